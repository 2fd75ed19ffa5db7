"""Errors of programs.

    ProgramError
    ├── RoleError            roles nested, or ended without having begun
    ├── UnknownVariable      read, but nothing in the program sets it (a KeyError too)
    ├── WrongType            the text of a variable is not of the dtype that was asked for (a ValueError too)
    ├── WrongArgument        an argument of a compiled program is not what its text needs (a TypeError too)
    ├── TemplateError        the model's chat template cannot be taken apart into roles
    ├── Unsupported          the backend cannot do this at all
    ├── BackendError         it was asked, and did not do it
    │   ├── Refused          it says that the request is wrong
    │   ├── Unreachable      it cannot be reached, does not answer, or died over it
    │   └── Unmatched        its replies are not as the turn that the program wants (speculation)
    ├── TraceError           the program cannot be compiled, and why
    └── Cancelled            interrupted from outside

Each names the program, its line (`where`) and the step (`step`).
"""

from __future__ import annotations

import copy
from typing import Self

from treeline_lang.where import Where


class ProgramError(Exception):
    """A failed step of a program. The first argument is the reason."""

    def __init__(self, reason: str, *, where: Where | None = None, step: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = where
        self.step = step

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.where, self.step, self.reason) if part)

    def at(self, where: Where | None, step: str) -> Self:
        """The same error with its place, unless it has one."""
        self.where = self.where or where
        self.step = self.step or step
        return self

    def again(self) -> Self:
        """A copy to raise in another thread, with its own traceback."""
        error = copy.copy(self)
        error.__traceback__ = None
        error.__cause__ = self
        return error


class RoleError(ProgramError):
    pass


class UnknownVariable(ProgramError, KeyError):
    __str__ = ProgramError.__str__


class WrongType(ProgramError, ValueError):
    pass


class WrongArgument(ProgramError, TypeError):
    pass


class TemplateError(ProgramError):
    pass


class Unsupported(ProgramError):
    pass


class BackendError(ProgramError):
    pass


class Refused(BackendError):
    pass


class Unreachable(BackendError):
    pass


class Unmatched(BackendError):
    pass


class TraceError(ProgramError):
    pass


class Cancelled(ProgramError):
    pass
