"""Reads a streamed chat completion from the bytes of its body. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
from treeline_wire.sse import EventStream

from treeline.printable import printable

LONGEST_EVENT = 4 << 20
"""Bytes; an event has a few hundred. A server that never ends one is stopped there."""


class BadAnswer(Exception):
    """The server did not send a chat completion, or not all of one; the message is a sentence without its end."""


class Piece(NamedTuple):
    """More of an answer, printable."""

    kind: Literal["reasoning", "text"]
    text: str


@dataclass
class ToolCall:
    name: str = ""
    arguments: str = ""
    """JSON, as far as the model wrote it."""


@dataclass
class Usage:
    """Tokens; None where the server does not say."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None


@dataclass
class Answer:
    """The answer so far."""

    text: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    finish_reason: str = ""
    replica: str = ""
    """The replica that answered, if the server names it."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class AnswerReader:
    """Takes the body as it comes, cut anywhere, and fills `answer`."""

    def __init__(self) -> None:
        self.answer = Answer()
        self._events = EventStream(LONGEST_EVENT)
        self._done = False

    def take(self, chunk: bytes) -> Iterator[Piece]:
        """Yields the pieces of a chunk. Raises BadAnswer, after the pieces before the error."""
        try:
            events = self._events.take(chunk)
        except ValueError as error:
            raise BadAnswer(f"the server sent {error}") from error
        for event in events:
            yield from self._read(event)

    def end(self) -> list[Piece]:
        """After the last chunk. Raises BadAnswer where the answer is not complete."""
        pieces = [piece for event in self._events.end() for piece in self._read(event)]
        if not (self._done or self.answer.finish_reason):
            raise BadAnswer("the answer broke off: the server closed the connection in the middle of it")
        return pieces

    def _read(self, event: str) -> list[Piece]:
        if event.strip() == "[DONE]":
            self._done = True
        if self._done:
            return []
        try:
            chunk = _DECODER.decode(event)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise BadAnswer(
                f"the server sent something that is no chunk of a chat completion: {brief(event)}"
            ) from None
        if chunk.error:
            raise BadAnswer(f"the server ended the answer: {said(chunk.error)}")
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else None
            self.answer.usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached)
        return [piece for choice in chunk.choices if choice.index == 0 for piece in self._add(choice)]

    def _add(self, choice: _Choice) -> list[Piece]:
        self.answer.finish_reason = printable(choice.finish_reason or self.answer.finish_reason)
        if (delta := choice.delta) is None:
            return []
        for part in delta.tool_calls or ():
            call = self.answer.calls.setdefault(part.index, ToolCall())
            if part.function is not None:
                call.name += printable(part.function.name or "")
                call.arguments += printable(part.function.arguments or "")
        pieces = []
        if reasoning := printable(delta.reasoning_content or delta.reasoning or ""):
            pieces.append(Piece("reasoning", reasoning))
        if text := printable(delta.content or ""):
            self.answer.text += text
            pieces.append(Piece("text", text))
        return pieces


def said(error: Any) -> str:
    """The message of an error in the form of OpenAI's API; for other forms the nearest text."""
    found = error.get("error", error) if isinstance(error, dict) else error
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return brief(found if isinstance(found, str) else msgspec.json.encode(found).decode())


def brief(text: str) -> str:
    """The text made printable, in one line of at most 300 characters."""
    line = printable(" ".join(text[:2000].split()))
    return line if len(line) <= 300 else f"{line[:300]}…"
