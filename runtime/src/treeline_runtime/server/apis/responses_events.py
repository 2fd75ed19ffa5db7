"""An answer to `/v1/responses`: the parts of the output → events, and the response as it is by then.

Events and their order: https://platform.openai.com/docs/api-reference/responses-streaming, and the types of the openai
package.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from treeline_runtime.messages import TextOut
from treeline_runtime.parsers.parts import Part
from treeline_runtime.server.apis.answering import Event
from treeline_runtime.server.apis.blocks import Begun, Block, Blocks, Ended, Grown, Step
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.http import named_event
from treeline_runtime.server.jobs import GenerationJob
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.service import usage


class ResponseEvents:
    """One response's: see `answering.Events`."""

    def __init__(
        self,
        job: GenerationJob,
        members: dict[str, Any],
        shown: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`members`: those of the response that do not change, besides those that repeat the request, which are in
        `shown` as JSON (an object that is not empty). `clock`: seconds since the epoch."""
        self._shown = shown
        self._items: list[dict[str, Any]] = []
        self._made = members | {
            "status": "in_progress",
            "output": self._items,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "completed_at": None,
        }
        self._job = job
        self._clock = clock
        self._blocks = Blocks()
        self._number = 0

    @property
    def answer(self) -> msgspec.Raw:
        """The response as it is by now. What it repeats may be large, and is copied as it is."""
        return msgspec.Raw(b"".join((encode_json(self._made)[:-1], b",", memoryview(self._shown)[1:])))

    def begin(self, _out: TextOut) -> Iterator[Event]:
        yield self._event("response.created", response=self.answer)
        yield self._event("response.in_progress", response=self.answer)

    def take(self, part: Part) -> Iterator[Event]:
        for step in self._blocks.take(part):
            yield from self._tell(step)

    def end(self, out: TextOut, reasoning_tokens: int | None = None) -> Iterator[Event]:
        finish = out.finish
        assert finish is not None
        for step in self._blocks.end(cut=finish.type != "stop"):
            yield from self._tell(step)
        self._made["usage"] = _usage(self._job, out, reasoning_tokens or 0)
        if finish.type == "stop":
            self._made |= {"status": "completed", "completed_at": int(self._clock())}
            yield self._event("response.completed", response=self.answer)
        elif finish.type == "length":
            self._made |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            yield self._event("response.incomplete", response=self.answer)
        else:
            yield self._failed(finish.message or "The request was ended")

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that fails: what came so far stays."""

        def all() -> Iterator[Event]:
            for step in self._blocks.end(cut=True):
                yield from self._tell(step)
            yield self._failed(error.body["error"]["message"])

        return b"".join(named_event(event) for event in all())

    def _failed(self, message: str) -> Event:
        self._made |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=self.answer)

    def _tell(self, step: Step) -> Iterator[Event]:
        match step:
            case Begun(block):
                yield from self._begun(block)
            case Grown(block, text):
                yield self._about(block, f"{_NAMES[block.kind]}.delta", delta=text, **_no_logprobs(block))
            case Ended(block, cut):
                yield from self._ended(block, cut)

    def _begun(self, block: Block) -> Iterator[Event]:
        item = _item(block)
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = _part(block)
            yield self._about(block, "response.content_part.added", part=part)
            item["content"] = [part]

    def _ended(self, block: Block, cut: bool) -> Iterator[Event]:
        item, text = self._items[block.index], block.text
        if block.kind == "call":
            item["arguments"] = text
            yield self._about(block, f"{_NAMES['call']}.done", name=block.name, arguments=text)
        else:
            (part,) = item["content"]
            part["text"] = text
            yield self._about(block, f"{_NAMES[block.kind]}.done", text=text, **_no_logprobs(block))
            yield self._about(block, "response.content_part.done", part=part)
        item["status"] = "incomplete" if cut else "completed"
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _about(self, block: Block, type: str, **members: Any) -> Event:
        where: Event = {"item_id": self._items[block.index]["id"], "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return self._event(type, **where, **members)

    def _event(self, type: str, **members: Any) -> Event:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **members}


def _usage(job: GenerationJob, out: TextOut, reasoning_tokens: int) -> dict[str, Any]:
    counted = usage(job, {0: out})
    cached = counted.prompt_tokens_details
    shown = (
        {} if not cached else {"input_tokens_details": {"cached_tokens": cached.cached_tokens, "cache_write_tokens": 0}}
    )
    return {
        "input_tokens": counted.prompt_tokens,
        **shown,
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": counted.total_tokens,
    }


_NAMES: Final = {
    "text": "response.output_text",
    "thought": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _item(block: Block) -> dict[str, Any]:
    """An item of the output that has begun."""
    key = uuid.uuid4().hex
    match block.kind:
        case "text":
            return {
                "id": f"msg_{key}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        case "thought":
            return {"id": f"rs_{key}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        case "call":
            return {
                "id": f"fc_{key}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": block.id or f"call_{key}",
                "name": block.name,
                "arguments": "",
            }


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _no_logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
