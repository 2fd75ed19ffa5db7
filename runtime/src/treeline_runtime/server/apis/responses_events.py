"""`POST /v1/responses`: parts of the output → events, and the response so far.

Events and their order: https://platform.openai.com/docs/api-reference/responses-streaming, and the types of the openai
package.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Response
from msgspec import UNSET

from treeline_runtime.messages import TextOut
from treeline_runtime.server import schema
from treeline_runtime.server.apis import answers
from treeline_runtime.server.apis.answering import Block, Event, EventMaker
from treeline_runtime.server.apis.responses_fields import ResponsesBody
from treeline_runtime.server.chat import call_id
from treeline_runtime.server.dependencies import Call, call_of, converting
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.prompts import Prompts

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


router = APIRouter()


@schema.post(
    router,
    "/v1/responses",
    tag=schema.OPENAI,
    summary="Answer a chat, in items",
    body=ResponsesBody,
    answer=answers.ResponseObject,
    event=answers.ResponseEvent,
)
async def responses(call: Annotated[Call[ChatTask], call_of("responses", "generate")]) -> Response:
    service, asked, task = call
    events = ResponseEvents(task, service.prompts, service.name_of(task))
    return await service.answer(asked, task, events, answer_bytes=3 * len(task.repeated))


schema.post(
    router,
    "/v1/responses/input_tokens",
    tag=schema.OPENAI,
    summary="Count the tokens of a chat's prompt",
    body=ResponsesBody,
    answer=answers.InputTokens,
)(converting("input_tokens"))


class ResponseEvents(EventMaker):
    """The events of one response."""

    def __init__(self, task: ChatTask, prompts: Prompts, model: str, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        super().__init__(task, prompts)
        self._clock = clock
        self._number = 0
        # Repeated members may be large, and are copied.
        repeated: dict[str, Any] = dict(_members(task.repeated))
        self.answer = answers.ResponseObject(id=task.rid, created_at=int(clock()), model=model, output=[], **repeated)

    def begin(self, out: TextOut) -> Iterator[Event]:
        yield self._event("response.created", response=self.answer)
        yield self._event("response.in_progress", response=self.answer)

    def end(self, out: TextOut, reasoning_tokens: int | None) -> Iterator[Event]:
        finish, answer = out.finish, self.answer
        assert finish is not None
        yield from self.end_blocks(cut=finish.type != "stop")
        answer.usage = self._usage(out, reasoning_tokens or 0)
        if finish.type == "stop":
            answer.status, answer.completed_at = "completed", int(self._clock())
            yield self._event("response.completed", response=answer)
        elif finish.type == "length":
            answer.status, answer.incomplete_details = "incomplete", answers.IncompleteDetails("max_output_tokens")
            yield self._event("response.incomplete", response=answer)
        else:
            yield self._failed(finish.message or "The request was ended")

    def failed(self, error: ApiError) -> bytes:
        """Earlier output stays."""
        ended = b"".join(map(self.write, self.end_blocks(cut=True)))
        return ended + self.write(self._failed(error.told["message"]))

    def _failed(self, message: str) -> answers.ResponseEvent:
        self.answer.status, self.answer.error = "failed", answers.ResponseError("server_error", message)
        return self._event("response.failed", response=self.answer)

    def block_begun(self, block: Block) -> Iterator[Event]:
        item, part = _item(block), _part(block)
        self.answer.output.append(item)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if part is not None:
            yield self._about(block, "response.content_part.added", part=part)
            item.content = [part]

    def block_grown(self, block: Block, text: str) -> Iterator[Event]:
        yield self._about(block, f"{_NAMES[block.kind]}.delta", delta=text, **_no_logprobs(block))

    def block_ended(self, block: Block, *, cut: bool) -> Iterator[Event]:
        item, text = self.answer.output[block.index], block.text
        if block.kind == "call":
            item.arguments = text
            yield self._about(block, f"{_NAMES['call']}.done", name=block.name, arguments=text)
        else:
            (part,) = item.content
            part.text = text
            yield self._about(block, f"{_NAMES[block.kind]}.done", text=text, **_no_logprobs(block))
            yield self._about(block, "response.content_part.done", part=part)
        item.status = "incomplete" if cut else "completed"
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _about(self, block: Block, type: str, **members: Any) -> answers.ResponseEvent:
        where: dict[str, Any] = {"item_id": self.answer.output[block.index].id, "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return self._event(type, **where, **members)

    def _event(self, type: str, **members: Any) -> answers.ResponseEvent:
        self._number += 1
        return answers.ResponseEvent(type, self._number - 1, **members)

    def _usage(self, out: TextOut, reasoning_tokens: int) -> answers.ResponseUsage:
        task, made = self.task, out.completion_tokens
        return answers.ResponseUsage(
            input_tokens=task.prompt_tokens,
            input_tokens_details=UNSET if task.hides_cache else answers.InputTokensDetails(out.cached_tokens, 0),
            output_tokens=made,
            output_tokens_details=answers.OutputTokensDetails(reasoning_tokens),
            total_tokens=task.prompt_tokens + made,
        )


_NAMES: Final = {
    "text": "response.output_text",
    "thought": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _item(block: Block) -> answers.ResponseItem:
    key = uuid.uuid4().hex
    match block.kind:
        case "text":
            return answers.ResponseItem(f"msg_{key}", "message", "in_progress", role="assistant", content=[])
        case "thought":
            return answers.ResponseItem(f"rs_{key}", "reasoning", "in_progress", summary=[], content=[])
        case "call":
            id = block.id or call_id()
            return answers.ResponseItem(
                f"fc_{key}", "function_call", "in_progress", call_id=id, name=block.name, arguments=""
            )


def _part(block: Block) -> answers.ResponsePart | None:
    match block.kind:
        case "text":
            return answers.ResponsePart("output_text", "", [], [])
        case "thought":
            return answers.ResponsePart("reasoning_text", "")
        case "call":
            return None


def _no_logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
