"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Response
from msgspec import UNSET
from msgspec.structs import replace

from treeline_runtime.messages import TextOut
from treeline_runtime.server import answers, openai, schema
from treeline_runtime.server.chat_answers import choices, deltas, message
from treeline_runtime.server.dependencies import Generating, Serving, task_of
from treeline_runtime.server.errors import Header
from treeline_runtime.server.http import DONE, Answer, event
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.pacing import Pacer, opened
from treeline_runtime.server.service import AnswerMaker, Service, token_headers, usage

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **schema.operation(
        tag=schema.OPENAI,
        summary="Answer a chat",
        body=openai.ChatBody,
        answer=answers.ChatCompletion,
        event=answers.ChatChunk,
    ),
)
async def chat(service: Serving, asked: Generating, task: Annotated[ChatTask, task_of("chat", "generate")]) -> Response:
    size = task.n * len(task.echo) + task.ids_bytes
    return await service.answer(asked, task, _Answer(service, task), answer_bytes=size)


class _Answer(AnswerMaker):
    def __init__(self, service: Service, task: ChatTask) -> None:
        self._prompts, self._model = service.prompts, service.model_name
        self._task = task
        self._choices = choices(service.prompts, task)
        self._last: dict[int, TextOut] = {}
        self._head = answers.ChatChunk(
            **openai.envelope(task.rid, "chat.completion.chunk", self._model),
            usage=None if task.usage else UNSET,
            choices=[],
        )

    def _usage(self, outs: Mapping[int, TextOut]) -> answers.Usage:
        counts = [count for choice in self._choices if (count := choice.reasoning_tokens) is not None]
        return usage(self._task, outs, sum(counts) if counts else None)

    async def whole(self, outs: list[TextOut]) -> Answer:
        task = self._task
        reasons = task.parsing is not None and task.parsing.reasoning is not None
        pieces, pacer = list[bytes](), Pacer()
        for index, (choice, out) in enumerate(zip(self._choices, outs, strict=True)):
            assert out.finish is not None, "a whole answer has ended"
            shown = answers.ChatChoice(
                index=index,
                message=message(await choice.take(out, pacer), reasons=reasons, echo=task.echo),
                finish_reason=choice.finish_reason(out.finish),
                matched_stop=out.finish.matched,
                token_ids=out.token_ids if task.token_ids else UNSET,
                logprobs=None,
            )
            pieces += [b"," if index else b"", opened(shown)]
            pieces += [*await openai.chat_logprobs(out, task.logprobs, self._prompts, pacer), b"}"]
        head = answers.ChatCompletion(
            **openai.envelope(task.rid, "chat.completion", self._model),
            usage=self._usage(dict(enumerate(outs))),
            prompt_token_ids=task.prompts[0].input_ids if task.token_ids else UNSET,
            choices=[],
        )
        tail = [b"]"]
        if task.prompt_logprobs is not None:
            tail += [b',"prompt_logprobs":', *await openai.prompt_logprobs(outs[0], task.prompt_logprobs, pacer)]
        return Answer([opened(head), *pieces, *tail, b"}"], headers=self.headers(outs[0]))

    def headers(self, first: TextOut) -> list[Header]:
        return token_headers(self._task.prompt_tokens, first.cached_tokens)

    def opening(self) -> bytes:
        """The role of each choice; the first chunk has the prompt's ids."""
        role, task = answers.ChatDelta("assistant", self._task.echo, None), self._task
        first = replace(self._head, prompt_token_ids=task.prompts[0].input_ids) if task.token_ids else self._head
        return b"".join(
            self._begun(index, role, head=self._head if index else first) + b"null" + _END for index in range(task.n)
        )

    def _begun(
        self, index: int, delta: answers.ChatDelta, *, head: answers.ChatChunk | None = None, **more: Any
    ) -> bytes:
        """A chunk up to its `choices[0].logprobs`."""
        head = head or self._head
        if self._task.continuous_usage and self._last:
            head = replace(head, usage=self._usage(self._last))
        choice = answers.ChatChunkChoice(index=index, delta=delta, logprobs=None, **more)
        return b"data: " + opened(head) + opened(choice)

    async def frames(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        self._last[index] = out
        task, choice, made = self._task, self._choices[index], list[bytes]()
        told = deltas(await choice.take(out, pacer))
        logprobs = openai.NO_LOGPROBS
        if (task.logprobs is not None or task.token_ids) and out.token_ids:
            logprobs = await openai.chat_logprobs(out, task.logprobs, self._prompts, pacer)
            told = told or [answers.ChatDelta()]  # tokens that say nothing, or whose text is held back
        ids: dict[str, Any] = {"token_ids": out.token_ids} if task.token_ids else {}
        for delta in told:
            made += [self._begun(index, delta, **ids), *logprobs, _END]
            logprobs, ids = openai.NO_LOGPROBS, {}
        if out.finish is not None:
            finish = choice.finish_reason(out.finish)
            end = self._begun(index, answers.ChatDelta(), finish_reason=finish, matched_stop=out.finish.matched)
            made += [end, b"null", _END]
        return made

    def closing(self) -> bytes:
        return (event(replace(self._head, usage=self._usage(self._last))) if self._task.usage else b"") + DONE


_END = b"}]}\n\n"
