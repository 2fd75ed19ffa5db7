"""The parts of an output, in the order in which they come, and who finds them."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Thought(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class Said(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A tool is called: the call number `index`, from 0."""

    index: int
    name: str
    id: str | None = None
    """The model's own name for the call, where its format has one."""


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of a call that has begun: all pieces together are the JSON of an object."""

    index: int
    text: str


Part = Thought | Said | CallBegun | CallArguments


class OutputParser(Protocol):
    """One output's, fed as it comes. What is found does not depend on where the text was cut."""

    def feed(self, text: str) -> list[Part]:
        """The output goes on with `text` → what is certain by now. Raises nothing: what is not in the model's format
        is `Said`."""

    def end(self) -> list[Part]:
        """The output is over → the rest. What is left open is returned as far as it came."""
