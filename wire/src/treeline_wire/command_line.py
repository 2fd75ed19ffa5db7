"""The command lines of all rooms: a wrong one is answered in three lines, however many flags there are."""

from __future__ import annotations

import argparse
from typing import NoReturn

_ONE_LINE = 1 << 16


class Parser(argparse.ArgumentParser):
    """Says how the command is called, what is wrong, and where to read more; argparse would print the whole usage.

    The parsers of its words (`add_subparsers`) are of this class, too.
    """

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{self._hint()}{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _hint(self) -> str:
        """The first line of a usage of our own, else the positional arguments behind `[OPTIONS]`."""
        if self.usage is not None:
            first, *_ = (self.usage % {"prog": self.prog}).splitlines()
            return f"usage: {first}\n"
        formatter = argparse.HelpFormatter(f"{self.prog} [OPTIONS]", width=_ONE_LINE)
        formatter.add_usage(None, self._get_positional_actions(), [])
        return f"{formatter.format_help().strip()}\n"
