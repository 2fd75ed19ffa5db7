"""`POST /v1/messages`: parts of the output → events, and the message so far.

Events and their order: https://platform.claude.com/docs/en/build-with-claude/streaming, and the types of the anthropic
package.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Response

from treeline_runtime.messages import TextOut
from treeline_runtime.server import schema
from treeline_runtime.server.apis import answers
from treeline_runtime.server.apis.answering import Block, Event, EventMaker, arguments_object
from treeline_runtime.server.apis.anthropic_fields import MessagesBody
from treeline_runtime.server.dependencies import Call, call_of, converting
from treeline_runtime.server.errors import ApiError, anthropic_error
from treeline_runtime.server.http import named_event
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.prompts import Prompts

router = APIRouter()


@schema.post(
    router,
    "/v1/messages",
    tag=schema.ANTHROPIC,
    summary="Answer a chat",
    body=MessagesBody,
    answer=answers.Message,
    event=answers.MessageEvent,
    error=answers.AnthropicError,
)
async def messages(call: Annotated[Call[ChatTask], call_of("messages", "generate")]) -> Response:
    service, asked, task = call
    return await service.answer(asked, task, MessageEvents(task, service.prompts, service.name_of(task)))


schema.post(
    router,
    "/v1/messages/count_tokens",
    tag=schema.ANTHROPIC,
    summary="Count the tokens of a chat's prompt",
    body=MessagesBody,
    answer=answers.TokenCount,
    error=answers.AnthropicError,
)(converting("count_tokens"))


class MessageEvents(EventMaker):
    """The events of one message."""

    def __init__(self, task: ChatTask, prompts: Prompts, model: str) -> None:
        super().__init__(task, prompts)
        usage = answers.MessageUsage(task.prompt_tokens, 0)
        self.answer = answers.Message(task.rid, "message", "assistant", model, [], None, None, usage)

    def begin(self, out: TextOut) -> Iterator[Event]:
        self.answer.usage = self._usage(out)
        yield answers.MessageEvent("message_start", message=self.answer)

    def end(self, out: TextOut, reasoning_tokens: int | None) -> Iterator[Event]:
        finish, answer = out.finish, self.answer
        assert finish is not None
        if finish.type not in ("stop", "length"):
            raise ApiError(500, finish.message or "The request was ended")
        yield from self.end_blocks(cut=finish.type == "length")
        matched = finish.matched if isinstance(finish.matched, str) else None
        reason: answers.StopReason = "tool_use" if self.called else "end_turn"
        if finish.type == "length":
            reason = "model_context_window_exceeded" if self.task.fills_context else "max_tokens"
        elif matched is not None:
            reason = "stop_sequence"
        answer.stop_reason, answer.stop_sequence, answer.usage = reason, matched, self._usage(out)
        if reasoning_tokens is not None:
            answer.usage.output_tokens_details = answers.ThinkingTokens(reasoning_tokens)
        delta = answers.MessageDelta(stop_reason=reason, stop_sequence=matched)
        yield answers.MessageEvent("message_delta", delta=delta, usage=answer.usage)
        yield answers.MessageEvent("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", anthropic_error(error))

    def block_begun(self, block: Block) -> Iterator[Event]:
        match block.kind:
            case "text":
                made = answers.MessageBlock("text", text="")
            case "thought":
                made = answers.MessageBlock("thinking", thinking="", signature="")
            case "call":
                id = block.id or f"toolu_{uuid.uuid4().hex[:24]}"
                made = answers.MessageBlock("tool_use", id=id, name=block.name, input={})
        self.answer.content.append(made)
        yield answers.MessageEvent("content_block_start", index=block.index, content_block=made)

    def block_grown(self, block: Block, text: str) -> Iterator[Event]:
        match block.kind:
            case "text":
                delta = answers.MessageDelta("text_delta", text=text)
            case "thought":
                delta = answers.MessageDelta("thinking_delta", thinking=text)
            case "call":
                delta = answers.MessageDelta("input_json_delta", partial_json=text)
        yield answers.MessageEvent("content_block_delta", index=block.index, delta=delta)

    def block_ended(self, block: Block, *, cut: bool) -> Iterator[Event]:
        made: answers.MessageBlock = self.answer.content[block.index]
        match block.kind:
            case "text":
                made.text = block.text
            case "thought":
                made.thinking = block.text
            case "call":
                made.input = arguments_object(block.text)
        yield answers.MessageEvent("content_block_stop", index=block.index)

    def _usage(self, out: TextOut) -> answers.MessageUsage:
        prompt_tokens = self.task.prompt_tokens
        if self.task.hides_cache:
            return answers.MessageUsage(prompt_tokens, out.completion_tokens)
        cached = min(out.cached_tokens, prompt_tokens)
        return answers.MessageUsage(prompt_tokens - cached, out.completion_tokens, cached, 0)
