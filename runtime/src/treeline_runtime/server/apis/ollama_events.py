"""`POST /api/chat` and `POST /api/generate`: parts of the output → lines of JSON, and the answer so far.

https://docs.ollama.com/api/streaming. Text and thinking come as they are made, a call when it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from msgspec import UNSET
from msgspec.structs import replace
from treeline_wire.ollama_errors import ollama_error_body

from treeline_runtime.messages import TextOut
from treeline_runtime.server import schema
from treeline_runtime.server.apis import answers, ollama_fields
from treeline_runtime.server.apis.answering import Block, Event, EventMaker, arguments_object
from treeline_runtime.server.chat import call_id
from treeline_runtime.server.dependencies import Call, call_of
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.http import Answer
from treeline_runtime.server.jobs import Answered, ChatTask
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.prompts import Prompts

router = APIRouter()
OllamaCall = Call[ChatTask | Answered]


async def _answer(call: OllamaCall, *, chat: bool) -> Response:
    service, asked, task = call
    if isinstance(task, Answered):
        return Answer(task.body)
    lines = OllamaLines(task, service.prompts, service.name_of(task), chat=chat, came_at=asked.came_at)
    return await service.answer(asked, task, lines)


async def chat(call: Annotated[OllamaCall, call_of("ollama_chat", "generate")]) -> Response:
    return await _answer(call, chat=True)


async def generate(call: Annotated[OllamaCall, call_of("ollama_generate", "generate")]) -> Response:
    return await _answer(call, chat=False)


_ANSWER: dict[str, Any] = {"answer": answers.OllamaAnswer, "lines": answers.OllamaAnswer, "error": answers.OllamaError}
for path, summary, body, endpoint in (
    ("/api/chat", "Answer a chat", ollama_fields.OllamaChatBody, chat),
    ("/api/generate", "Answer a prompt", ollama_fields.OllamaGenerateBody, generate),
):
    schema.post(router, path, tag=schema.OLLAMA, summary=summary, body=body, **_ANSWER)(endpoint)


class OllamaLines(EventMaker):
    """The lines of one answer."""

    media_type: ClassVar = "application/x-ndjson"

    def __init__(self, task: ChatTask, prompts: Prompts, model: str, *, chat: bool, came_at: float) -> None:
        """`came_at`: when the request came, in monotonic seconds."""
        super().__init__(task, prompts)
        self._model, self._chat = model, chat
        self._came_at = self._first_at = came_at
        self._said, self._thought = list[str](), list[str]()
        self._calls = list[answers.OllamaCall]()

    def write(self, event: Any) -> bytes:
        return encode_json(event) + b"\n"

    def begin(self, out: TextOut) -> Iterator[Event]:
        self._first_at = time.monotonic()
        return iter(())

    def end(self, out: TextOut, reasoning_tokens: int | None) -> Iterator[Event]:
        finish = out.finish
        assert finish is not None
        if finish.type not in ("stop", "length"):
            raise ApiError(500, finish.message or "The request was ended")
        yield from self.end_blocks(cut=finish.type == "length")
        before, after = self._first_at - self._came_at, time.monotonic() - self._first_at
        last = self._line(
            done=True,
            done_reason=finish.type,
            total_duration=_ns(before) + _ns(after),
            load_duration=0,
            prompt_eval_count=self.task.prompt_tokens,
            prompt_eval_duration=_ns(before),
            eval_count=out.completion_tokens,
            eval_duration=_ns(after),
        )
        whole = self._line(
            text="".join(self._said),
            thinking="".join(self._thought) or UNSET,
            **({"tool_calls": self._calls} if self._calls else {}),
        )
        self.answer = replace(last, message=whole.message, response=whole.response, thinking=whole.thinking)
        yield last

    def failed(self, error: ApiError) -> bytes:
        return self.write(ollama_error_body(error.told["message"]))

    def block_grown(self, block: Block, text: str) -> Iterator[Event]:
        match block.kind:
            case "text":
                self._said.append(text)
                yield self._line(text=text)
            case "thought":
                self._thought.append(text)
                yield self._line(thinking=text)

    def block_ended(self, block: Block, *, cut: bool) -> Iterator[Event]:
        if block.kind == "call":
            function = answers.OllamaFunction(len(self._calls), block.name, arguments_object(block.text))
            self._calls.append(answers.OllamaCall(block.id or call_id(), function))
            yield self._line(tool_calls=self._calls[-1:])

    def _line(self, **members: Any) -> answers.OllamaAnswer:
        return ollama_fields.answer(self._model, chat=self._chat, **members)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
