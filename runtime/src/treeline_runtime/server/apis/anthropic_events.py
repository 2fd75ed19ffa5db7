"""An answer to `/v1/messages`: the parts of the output → events, and the message as it is by then.

Events and their order: https://platform.claude.com/docs/en/build-with-claude/streaming, and the types of the anthropic
package.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from treeline_runtime.messages import TextOut
from treeline_runtime.parsers.parts import Part
from treeline_runtime.server.apis.answering import Event
from treeline_runtime.server.apis.blocks import Begun, Block, Blocks, Ended, Grown, Step
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import GenerationJob

_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MessageEvents:
    """One message's: see `answering.Events`."""

    def __init__(self, job: GenerationJob, model: str, *, fills_context: bool) -> None:
        """`fills_context`: more tokens were asked for than the context has room for."""
        self.answer: dict[str, Any] = {
            "id": job.rid,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._job = job
        self._blocks = Blocks()
        self._length = "model_context_window_exceeded" if fills_context else "max_tokens"

    def begin(self, out: TextOut) -> Iterator[Event]:
        self.answer["usage"] = _usage(self._job, out)
        yield {"type": "message_start", "message": self.answer}

    def take(self, part: Part) -> Iterator[Event]:
        for step in self._blocks.take(part):
            yield self._tell(step)

    def end(self, out: TextOut, reasoning_tokens: int | None = None) -> Iterator[Event]:
        finish = out.finish
        assert finish is not None
        if finish.type not in ("stop", "length"):
            raise ApiError(500, finish.message or "The request was ended", type="server_error")
        for step in self._blocks.end(cut=finish.type == "length"):
            yield self._tell(step)
        matched = finish.matched if isinstance(finish.matched, str) else None
        if finish.type == "length":
            reason = self._length
        elif matched is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._blocks.called else "end_turn"
        stopped = {"stop_reason": reason, "stop_sequence": matched}
        usage = _usage(self._job, out)
        if reasoning_tokens is not None:
            usage["output_tokens_details"] = {"thinking_tokens": reasoning_tokens}
        self.answer |= stopped | {"usage": usage}
        yield {"type": "message_delta", "delta": stopped, "usage": usage}
        yield {"type": "message_stop"}

    def _tell(self, step: Step) -> Event:
        content: list[dict[str, Any]] = self.answer["content"]
        match step:
            case Begun(block):
                made = _block(block)
                content.append(made)
                return {"type": "content_block_start", "index": block.index, "content_block": made}
            case Grown(block, text):
                return {"type": "content_block_delta", "index": block.index, "delta": _delta(block, text)}
            case Ended(block):
                made = content[block.index]
                match block.kind:
                    case "text":
                        made["text"] = block.text
                    case "thought":
                        made["thinking"] = block.text
                    case "call":
                        made["input"] = _input(block.text)
                return {"type": "content_block_stop", "index": block.index}


def _usage(job: GenerationJob, out: TextOut) -> dict[str, Any]:
    """What was read from the cache is counted beside the input, not within it."""
    made: dict[str, Any] = {"input_tokens": job.prompt_tokens, "output_tokens": out.completion_tokens}
    if job.hides_cache:
        return made
    cached = min(out.cached_tokens, job.prompt_tokens)
    return made | {
        "input_tokens": job.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _block(block: Block) -> dict[str, Any]:
    """A block that has begun."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            id = block.id or f"toolu_{uuid.uuid4().hex[:24]}"
            return {"type": "tool_use", "id": id, "name": block.name, "input": {}}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "thought":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _input(arguments: str) -> Any:
    """The arguments as an object, as the model wrote it; where they are none, the model was cut off or erred, their
    text under a name of its own, so that nothing of it is lost and nothing is made up."""
    if not arguments.strip():
        return {}
    raw = arguments.encode()
    try:
        _arguments.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return {"raw_arguments": arguments}
    return msgspec.Raw(raw)
