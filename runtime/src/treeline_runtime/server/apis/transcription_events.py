"""`POST /v1/audio/transcriptions`: the output → its text, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Response

from treeline_runtime.messages import TextOut
from treeline_runtime.server import schema
from treeline_runtime.server.answers import Error
from treeline_runtime.server.apis import answers
from treeline_runtime.server.apis.answering import Block, Event, EventMaker
from treeline_runtime.server.apis.transcription_fields import MARK, TranscriptionBody
from treeline_runtime.server.dependencies import Call, call_of
from treeline_runtime.server.http import Answer
from treeline_runtime.server.jobs import TranscriptTask
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.prompts import Prompts

router = APIRouter()


@schema.post(
    router,
    "/v1/audio/transcriptions",
    tag=schema.OPENAI,
    summary="Write down what is said",
    form=TranscriptionBody,
    answer=answers.Transcription,
    event=answers.TranscriptDelta | answers.TranscriptDone,
    error=Error,
)
async def transcriptions(call: Annotated[Call[TranscriptTask], call_of("transcription", "generate")]) -> Response:
    service, asked, task = call
    return await service.answer(asked, task, Transcript(task, service.prompts))


class Transcript(EventMaker):
    def __init__(self, task: TranscriptTask, prompts: Prompts) -> None:
        super().__init__(task, prompts)
        self._format = task.format
        self._is_said = task.knows_language
        """Whether what comes is said in the recording."""
        self._said = ""

    def write(self, event: Any) -> bytes:
        return b"data: " + encode_json(event) + b"\n\n"

    async def whole(self, outs: list[TextOut]) -> Answer:
        answer = await super().whole(outs)
        if self._format == "text":
            return Answer(self._said.encode(), headers=self.headers(outs[0]), content_type=b"text/plain; charset=utf-8")
        return answer

    def end(self, out: TextOut, reasoning_tokens: int | None) -> Iterator[Event]:
        yield from self.end_blocks(cut=False)
        if not self._is_said and self._said:
            yield answers.TranscriptDelta(self._said)
        total = out.prompt_tokens + out.completion_tokens
        usage = answers.TranscriptUsage(out.prompt_tokens, out.completion_tokens, total)
        self.answer = answers.Transcription(self._said, usage)
        yield answers.TranscriptDone(self._said, usage)

    def block_grown(self, block: Block, text: str) -> Iterator[Event]:
        self._said += text
        if not self._is_said:
            _, mark, rest = self._said.partition(MARK)
            if not mark:
                return
            self._is_said, self._said, text = True, rest, rest
        if text:
            yield answers.TranscriptDelta(text)
