"""Parts of an output → blocks that begin, grow and end one after the other, as the streams of both APIs tell them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from treeline_runtime.parsers.parts import CallArguments, CallBegun, Part, Said, Thought

Kind = Literal["text", "thought", "call"]


@dataclass
class Block:
    """One text, one piece of reasoning, or one call, whose text are its arguments."""

    index: int
    kind: Kind
    name: str = ""
    """Of the tool."""
    id: str | None = None
    """The model's own, of the call."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Begun:
    block: Block


@dataclass(frozen=True)
class Grown:
    block: Block
    text: str


@dataclass(frozen=True)
class Ended:
    block: Block
    cut: bool
    """The output ended in the midst of it."""


Step = Begun | Grown | Ended


class Blocks:
    """One output's. Of blanks no text is begun: between reasoning, calls and texts they are the model's way to
    separate them."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Block | None = None
        self._blanks: tuple[Kind, str] = ("text", "")
        """Those that came last while nothing of their kind was open."""
        self.called = False
        """A tool is called."""

    def take(self, part: Part) -> Iterator[Step]:
        """The output goes on."""
        match part:
            case Thought(text):
                yield from self._text("thought", text)
            case Said(text):
                yield from self._text("text", text)
            case CallBegun(_, name, id):
                self.called = True
                yield from self._begin(Block(self._count, "call", name, id))
            case CallArguments(_, text) if text:
                assert self._open is not None, "a call has begun"
                assert self._open.kind == "call", "the arguments of a call follow it"
                yield self._grow(text)

    def end(self, *, cut: bool) -> Iterator[Step]:
        """The output is over; `cut`: before its end."""
        kind, blanks = self._blanks
        if not self._count and kind == "text" and blanks:
            yield from self._begin(Block(0, "text"))
            yield self._grow(blanks)
        yield from self._close(cut=cut)

    def _text(self, kind: Kind, text: str) -> Iterator[Step]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            before, blanks = self._blanks
            text = blanks + text if before == kind else text
            if text.isspace():
                self._blanks = (kind, text)
                return
            yield from self._begin(Block(self._count, kind))
        yield self._grow(text)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._close(cut=False)
        self._blanks = ("text", "")
        self._open = block
        self._count += 1
        yield Begun(block)

    def _grow(self, text: str) -> Grown:
        assert self._open is not None
        self._open.pieces.append(text)
        return Grown(self._open, text)

    def _close(self, *, cut: bool) -> Iterator[Step]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield Ended(closed, cut)
