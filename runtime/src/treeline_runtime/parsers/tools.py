"""Parsers of tool calls: the steps that the formats share, and the formats whose calls stand between markers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from treeline_runtime.parsers.json_text import call_object
from treeline_runtime.parsers.source import BrokenError, Markers, OverError, Source, Steps


def attempt(source: Source, steps: Steps[None]) -> Steps[bool]:
    """Read what may be a call → was it one? If not, all that was read of it is said, but for the end of one that
    broke off with the output."""
    try:
        yield from steps
    except OverError:
        if not source.certain:
            source.say(source.release())
    except BrokenError:
        source.say(source.release())
        return False
    source.settle()
    return True


@dataclass(frozen=True)
class Marked:
    """A format whose calls begin with a marker."""

    call: Callable[[Source, Collection[str], str], Steps[None]]
    """Reads a call behind its marker, up to what closes it."""
    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    """What may follow a call, and is nobody's answer then."""
    special: bool = False
    """Its markers are special tokens, of some models at least."""

    def steps(self, source: Source, names: frozenset[str]) -> Steps[None]:
        opening, either = Markers(*self.opening), Markers(*self.opening, *self.closing)
        looked_for, trim = opening, False
        while marker := (yield from source.until(looked_for, source.say, trim=trim)):
            if marker in self.closing:
                source.settle()
            else:
                trim = yield from attempt(source, self.call(source, names, marker))
                looked_for = either if trim else opening


def _hermes(source: Source, names: Collection[str], marker: str) -> Steps[None]:
    yield from source.space()
    yield from call_object(source, names)


HERMES = Marked(_hermes, ("<tool_call>",), ("</tool_call>",), special=True)
"""`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
