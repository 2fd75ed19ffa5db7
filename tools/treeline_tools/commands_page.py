"""docs/serve.md and docs/commands.md: every flag of every command, from the parsers that read them."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final
from unittest import mock

from treeline.main import WORDS
from treeline_runtime.args import build_parser

_SERVE_HEAD: Final = """\
# Flags of `treeline serve`

`treeline serve --help` shows the common ones, `--help-all` all of them.
"""
_HEAD: Final = """\
# Flags of the other commands

`treeline WORD --help` shows the same, with examples. [`treeline serve`](serve.md) has its own page.
"""
SUBCOMMANDS: Final = {"pick": ("explain",), "operate": ("plan",), "bench": ("serving", "programs")}
"""Words behind a word that have a parser of their own."""


class _Found(Exception):
    """The parser that a command is about to read its arguments with."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def serve_page() -> str:
    """The whole page of `treeline serve`."""
    return "\n".join((_SERVE_HEAD, *_groups(build_parser(), "##"))) + "\n"


def commands_page() -> str:
    """The whole page of all other words."""
    lines = [_HEAD]
    for word, about in WORDS.items():
        lines += [f"## treeline {word}", "", f"{_sentence(about.help)}", ""]
        if word != "serve":
            lines += _tables(parser_of(word), "###")
        else:
            lines += ["Its flags: [serve.md](serve.md).", ""]
        for sub in SUBCOMMANDS.get(word, ()):
            lines += _command(parser_of(word, sub), f"treeline {word} {sub}", parser_of(word))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def parser_of(word: str, *argv: str) -> argparse.ArgumentParser:
    """The parser that a word reads its arguments with."""

    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Found(parser)

    module = importlib.import_module(WORDS[word].module)
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", found):
        try:
            module.main(list(argv))
        except _Found as stop:
            return stop.parser
    raise AssertionError(f"treeline {word} reads no arguments")


def _command(parser: argparse.ArgumentParser, title: str, above: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of a word behind the word of `above`, whose flags are not explained again."""
    yield from (f"### {title}", "")
    if parser.description:
        yield from (_sentence(parser.description), "")
    known = set(_rows(above._actions))
    yield from _groups(parser, "####", known)
    if again := [row.split(" ", 2)[1].rstrip(",") for row in _rows(parser._actions) if row in known]:
        yield from (f"As for `{above.prog}`: {', '.join(again)}.", "")


def _tables(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """A parser's own arguments, then its words'."""
    yield from _groups(parser, level)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                yield from (f"{level} {parser.prog} {name}", "")
                if one.description:
                    yield from (_sentence(one.description), "")
                yield from _tables(one, level + "#")


def _groups(parser: argparse.ArgumentParser, level: str, known: Container[str] = ()) -> Iterator[str]:
    groups = [
        (str(group.title), [row for row in _rows(group._group_actions) if row not in known])
        for group in parser._action_groups
    ]
    groups = [(title, rows) for title, rows in groups if rows]
    for title, rows in groups:
        if len(groups) > 1:
            yield from (f"{level} {title[0].upper()}{title[1:]}", "")
        yield from ("| flag | |\n|---|---|", *rows, "")


def _rows(actions: Sequence[argparse.Action]) -> Iterator[str]:
    for action in actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.dest == "help_all":
            continue
        if action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings or [_cell(_metavar(action) or action.dest)])
        value = "" if not action.option_strings or action.nargs == 0 else _value(action)
        said = " ".join((str(action.help or "") % {"prog": "treeline", **vars(action)}).split())
        yield f"| {names} {value} | {_cell(said)} |".replace("  ", " ")


def _value(action: argparse.Action) -> str:
    return _cell(_metavar(action)) or (" \\| ".join(map(str, action.choices)) if action.choices else "")


def _metavar(action: argparse.Action) -> str:
    return " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith((".", ":", "?")) else ".")
