"""Command-line errors of all rooms in three lines, however many flags there are."""

from __future__ import annotations

import argparse
import signal
from types import FrameType
from typing import NoReturn

_ONE_LINE = 1 << 16


class Parser(argparse.ArgumentParser):
    """Prints the command, the error, and where to read more; argparse would print the whole usage.

    Its subparsers (`add_subparsers`) are of this class too.
    """

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{self._hint()}{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _hint(self) -> str:
        """The first line of our own usage, else the positional arguments after `[OPTIONS]`."""
        if self.usage is not None:
            first, *_ = (self.usage % {"prog": self.prog}).splitlines()
            return f"usage: {first}\n"
        formatter = argparse.HelpFormatter(f"{self.prog} [OPTIONS]", width=_ONE_LINE)
        formatter.add_usage(None, self._get_positional_actions(), [])
        return f"{formatter.format_help().strip()}\n"


def take_interrupts() -> None:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt from now on, so that a run ends with what there is, and through every
    `finally`.

    Works however the process was started: it inherits ignored signals, as a shell script's background commands do
    SIGINT, and blocked ones. Python keeps both, and an hour's run could not be ended.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
