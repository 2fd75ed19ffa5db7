"""The command lines of all rooms: errors of three lines, with a suggestion for a mistyped word; help in colours on a
terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from types import FrameType
from typing import Any, NoReturn

_ONE_LINE = 1 << 16


class Parser(argparse.ArgumentParser):
    """Prints the command, the error, and where to read more; argparse would print the whole usage.

    Its subparsers (`add_subparsers`) are of this class too.
    """

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, and remembers the words, so that an error can name the mistyped one."""
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        self.exit(2, f"{self._hint()}{self.prog}: error: {message}{self._meant()}\nTry '{self.prog} --help'.\n")

    def print_help(self, file: Any = None) -> None:
        """Prints the help, with colours if it goes to a terminal and `NO_COLOR` is not set."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if (file or sys.stdout).isatty() and not plain:
            self.formatter_class = _coloured(self.formatter_class)
        super().print_help(file)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse does it, but an output that takes nothing is an error."""
        if message and (file := file or sys.stderr) is not None:
            file.write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            listed = ", ".join(map(repr, known))
            message = f"invalid choice: {value!r} (choose from {listed}){perhaps(str(value), known)}"
            raise argparse.ArgumentError(action, message)

    def _hint(self) -> str:
        """Returns the first line of our own usage, else the positional arguments after `[OPTIONS]`."""
        if self.usage is not None:
            first, *_ = (self.usage % {"prog": self.prog}).splitlines()
            return f"usage: {first}\n"
        formatter = argparse.HelpFormatter(f"{self.prog} [OPTIONS]", width=_ONE_LINE)
        formatter.add_usage(None, self._get_positional_actions(), [])
        return f"{formatter.format_help().strip()}\n"

    def _meant(self) -> str:
        """Returns a suggestion for the first unknown flag; empty if there is none."""
        known = self._flags(self._given)
        for word in self._given:
            flag = word.partition("=")[0]
            if flag == "--":
                break
            if flag.startswith("--") and not any(one.startswith(flag) for one in known):
                return perhaps(flag, known)
        return ""

    def _flags(self, words: Sequence[str]) -> list[str]:
        """Returns its own flags and those of its subcommands among `words`."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for name, sub in action.choices.items() if name in words for flag in sub._flags(words)]
        return flags


def one_of_two(parser: argparse.ArgumentParser, word: str | None, flag: str | None, name: str) -> str | None:
    """Returns the value given as the word `NAME` or as the flag `--name`; exits with status 2 if both are given."""
    if word is not None and flag is not None:
        parser.error(f"{name.upper()} is given twice, as {word!r} and as --{name} {flag!r}: leave one out")
    return flag if word is None else word


def perhaps(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error that suggests the nearest known word; empty if none is near."""
    return "".join(f"; did you mean {match}?" for match in get_close_matches(word, known, 1, cutoff=0.7))


def _coloured(formatter: Any) -> Any:
    """Returns the same formatter with colours, if their library is installed; the images do without it."""
    try:
        from rich_argparse import RawDescriptionRichHelpFormatter, RichHelpFormatter
    except ImportError:
        return formatter
    raw = issubclass(formatter, argparse.RawDescriptionHelpFormatter)
    base = RawDescriptionRichHelpFormatter if raw else RichHelpFormatter
    # Brackets in our texts are brackets, and the names of groups stay as they are.
    return type("Coloured", (base,), {"text_markup": False, "usage_markup": False, "group_name_formatter": str})


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end the process at once, silently, with status 128 + signal.

    It is for times without anything to clean up, in which an exception would come too late or get lost: while
    libraries load, or download with threads of their own.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def take_interrupts() -> None:
    """Makes Ctrl-C and SIGTERM raise KeyboardInterrupt, so that a run ends with its results so far, and through every
    `finally`.

    Works however the process was started: it inherits ignored signals, as a shell script's background commands do
    SIGINT, and blocked ones. Python keeps both, and an hour's run could not be ended.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
