"""Answers of another chat API, whole or as events.

All of them describe an output as blocks, one after the other. White space alone begins no text: models separate
reasoning, calls and texts by it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from treeline_runtime.messages import TextOut
from treeline_runtime.parsers.source import CallArguments, CallBegun, Part, Said, Thought
from treeline_runtime.server.apis.answers import (
    MessageEvent,
    OllamaAnswer,
    ResponseEvent,
    TranscriptDelta,
    TranscriptDone,
)
from treeline_runtime.server.chat import choices
from treeline_runtime.server.errors import Header
from treeline_runtime.server.http import Answer, named_event
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.pacing import Pacer, encode_json
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.service import AnswerMaker, token_headers

_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw])
Event = ResponseEvent | MessageEvent | OllamaAnswer | TranscriptDelta | TranscriptDone
"""Write an event before requesting the next one: parts of it may change."""
Kind = Literal["text", "thought", "call"]


@dataclass
class Block:
    """A text, a piece of reasoning, or a call with its arguments as text."""

    index: int
    kind: Kind
    name: str = ""
    id: str | None = None
    """The model's own id of the call."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def arguments_object(arguments: str) -> Any:
    """A call's arguments as an object, as the model wrote it. If they are not one (cut off or wrong), their text under
    a special name, so that nothing is lost or invented."""
    if not arguments.strip():
        return {}
    raw = arguments.encode()
    try:
        _arguments.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return {"raw_arguments": arguments}
    return msgspec.Raw(raw)


class EventMaker(AnswerMaker):
    """An answer's events, and the answer so far."""

    answer: Any
    """The answer so far; becomes JSON."""

    def __init__(self, task: ChatTask, prompts: Prompts) -> None:
        self.task = task
        (self._choice,) = choices(prompts, task)
        self._begun = False
        self._count = 0
        self._open: Block | None = None
        self._blanks: tuple[Kind, str] = ("text", "")
        """White space that came last, with its kind, while no block of this kind was open."""
        self.called = False

    # ---- in the words of the API --------------------------------------------------------------------------------

    def begin(self, out: TextOut) -> Iterator[Event]:
        """Returns the events of the first output."""
        return iter(())

    @abstractmethod
    def end(self, out: TextOut, reasoning_tokens: int | None) -> Iterator[Event]:
        """Returns the events of the last output. `reasoning_tokens`: None = unknown. Raises ApiError for an end that
        the API cannot express."""

    def write(self, event: Any) -> bytes:
        """An event as bytes of the stream."""
        return named_event(event.type, event)

    def block_begun(self, block: Block) -> Iterator[Event]:
        return iter(())

    @abstractmethod
    def block_grown(self, block: Block, text: str) -> Iterator[Event]: ...

    def block_ended(self, block: Block, *, cut: bool) -> Iterator[Event]:
        """`cut`: the output ended inside it."""
        return iter(())

    # ---- whole or as it comes -----------------------------------------------------------------------------------

    async def _tell(self, out: TextOut, pacer: Pacer, told: Callable[[Iterator[Event]], object]) -> None:
        if not self._begun:
            self._begun = True
            told(self.begin(out))
        for part in await self._choice.take(out, pacer):
            told(self.take(part))
        if out.finish is not None:
            told(self.end(out, self._choice.reasoning_tokens))

    async def frames(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        made = list[bytes]()
        await self._tell(out, pacer, lambda events: made.extend(map(self.write, events)))
        return made

    async def whole(self, outs: list[TextOut]) -> Answer:
        await self._tell(outs[0], Pacer(), lambda events: deque(events, maxlen=0))
        return Answer(encode_json(self.answer), headers=self.headers(outs[0]))

    def headers(self, first: TextOut) -> list[Header]:
        return token_headers(self.task.prompt_tokens, first.cached_tokens)

    def closing(self) -> bytes:
        return b""

    # ---- blocks -------------------------------------------------------------------------------------------------

    def take(self, part: Part) -> Iterator[Event]:
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
                yield from self._grow(text)

    def end_blocks(self, *, cut: bool) -> Iterator[Event]:
        """The output ended; `cut`: early."""
        kind, blanks = self._blanks
        if not self._count and kind == "text" and blanks:
            yield from self._begin(Block(0, "text"))
            yield from self._grow(blanks)
        yield from self._close(cut=cut)

    def _text(self, kind: Kind, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            before, blanks = self._blanks
            text = blanks + text if before == kind else text
            if text.isspace():
                self._blanks = (kind, text)
                return
            yield from self._begin(Block(self._count, kind))
        yield from self._grow(text)

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._close(cut=False)
        self._blanks = ("text", "")
        self._open = block
        self._count += 1
        yield from self.block_begun(block)

    def _grow(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        self._open.pieces.append(text)
        yield from self.block_grown(self._open, text)

    def _close(self, *, cut: bool) -> Iterator[Event]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield from self.block_ended(closed, cut=cut)
