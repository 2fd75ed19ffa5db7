"""The line of the user's program that each step came from."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any

_OURS = __name__.partition(".")[0]
_BETWEEN = ("contextlib",)
"""Modules between a program and us: the `with` around a turn."""


@dataclass(frozen=True, slots=True)
class Where:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


def caller() -> Where | None:
    """The innermost stack frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        ours = module == _OURS or module in _BETWEEN or module.startswith(_OURS + ".")
        if not ours:
            return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def name_of(body: Callable[..., Any]) -> str:
    """The name of a function; of other callables, that of the wrapped function or the type."""
    while isinstance(body, functools.partial):
        body = body.func
    return getattr(body, "__name__", type(body).__name__)


def raised_at(error: Exception, body: Callable[..., Any]) -> Where:
    """The last line of the program's own file that an error passed; else the last line anywhere."""
    file = getattr(getattr(body, "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    frame = (own or frames)[-1]
    return Where(frame.filename, frame.lineno or 0, frame.name)
