"""docs/serve.md: every flag of `treeline serve`, written from the settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from treeline_runtime.args import build_parser

_HEAD: Final = """\
# Flags of `treeline serve`

Generated from the runtime's settings (`runtime/src/treeline_runtime/config.py` and `args.py`). `treeline serve --help`
shows those that one needs now and then, `--help-all` all of them. The model needs no flag:
`treeline serve MODEL`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join((_HEAD, *_tables(build_parser()))) + "\n"


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        rows = [_row(action) for action in actions if action.dest not in ("help_all", "word")]
        if rows:
            title = str(group.title)
            yield f"## {title[0].upper()}{title[1:]}\n\n| flag | |\n|---|---|"
            yield from rows
            yield ""


def _row(action: argparse.Action) -> str:
    flag = ", ".join(f"`{name}`" for name in action.option_strings)
    value = action.metavar or (" \\| ".join(map(str, action.choices)) if action.choices else "")
    said = str(action.help or "") % vars(action)
    return f"| {flag} {value} | {said.replace('|', chr(92) + '|')} |".replace("  ", " ")
