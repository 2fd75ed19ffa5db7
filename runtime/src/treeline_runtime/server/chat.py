"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Response
from msgspec import UNSET
from msgspec.structs import replace

from treeline_runtime.messages import TextOut
from treeline_runtime.server import answers, openai, schema
from treeline_runtime.server.chat_answers import Choice, message
from treeline_runtime.server.dependencies import Generating, ReadingRoute
from treeline_runtime.server.http import DONE, Answer, ApiRequest, event
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.pacing import Pacer, opened
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.service import Service, token_headers, usage
from treeline_runtime.server.special_tokens import SpecialTokens
from treeline_runtime.tokenizer_manager import InflightRequest

_NOTHING_SPECIAL: Final = SpecialTokens(())

router = APIRouter(route_class=ReadingRoute)


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
async def chat_completions(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "generate")
    task = await service.read(asked, "chat", ChatTask)
    size = task.job.n * len(task.echo) + task.told.size(task.job)
    inflight = await service.open(task.job, asked, answer_bytes=size)
    answer = _Answer(service, task)
    if task.streaming.on:
        return await answer.stream(asked, inflight)
    return await answer.whole(await service.collect(inflight))


def choices(prompts: Prompts, task: ChatTask) -> list[Choice]:
    """The choices of an answer, of which nothing has come yet."""
    parsing = task.parsing
    hidden = parsing is not None and parsing.needs_special_tokens and not task.shown.special_tokens
    special = prompts.special_tokens if hidden else _NOTHING_SPECIAL
    closing = None if parsing is None else parsing.closing
    end = None if closing is None else prompts.token_of(closing)
    return [Choice(None if parsing is None else parsing.parser(), task.shown, special, end) for _ in range(task.job.n)]


class _Answer:
    """What becomes of the outputs of one request."""

    def __init__(self, service: Service, task: ChatTask) -> None:
        self._service = service
        self._task = task
        self._choices = choices(service.prompts, task)

    def _usage(self, outs: Mapping[int, TextOut]) -> answers.Usage:
        counts = [count for choice in self._choices if (count := choice.reasoning_tokens) is not None]
        return usage(self._task.job, outs, sum(counts) if counts else None)

    async def whole(self, outs: list[TextOut]) -> Answer:
        job, parsing, told = self._task.job, self._task.parsing, self._task.told
        reasons = parsing is not None and parsing.reasoning is not None
        pieces, pacer = list[bytes](), Pacer()
        for index, (choice, out) in enumerate(zip(self._choices, outs, strict=True)):
            assert out.finish is not None, "a whole answer has ended"
            made = message(await choice.take(out, pacer), reasons=reasons)
            if self._task.echo:
                made["content"] = self._task.echo + (made["content"] or "")
            shown = answers.ChatChoice(
                index=index,
                message=answers.ChatMessage(**made),
                finish_reason=choice.finish_reason(out.finish),
                matched_stop=out.finish.matched,
                token_ids=out.token_ids if told.token_ids else UNSET,
                logprobs=None,
            )
            pieces += [b"," if index else b"", opened(shown)]
            pieces += [*await openai.chat_logprobs(out, told.logprobs, self._service.prompts, pacer), b"}"]
        head = answers.ChatCompletion(
            **openai.envelope(job.rid, "chat.completion", self._service.model_name),
            usage=self._usage(dict(enumerate(outs))),
            prompt_token_ids=job.prompts[0].input_ids if told.token_ids else UNSET,
            choices=[],
        )
        tail = [b"]"]
        if told.prompt_logprobs is not None:
            tail += [b',"prompt_logprobs":', *await openai.prompt_logprobs(outs[0], told.prompt_logprobs, pacer)]
        headers = token_headers(job.prompt_tokens, outs[0].cached_tokens)
        return Answer([opened(head), *pieces, *tail, b"}"], headers=headers)

    async def stream(self, asked: ApiRequest, inflight: InflightRequest) -> Response:
        job, streaming, told = self._task.job, self._task.streaming, self._task.told
        head = answers.ChatChunk(
            **openai.envelope(job.rid, "chat.completion.chunk", self._service.model_name),
            usage=None if streaming.usage else UNSET,
            choices=[],
        )
        last: dict[int, TextOut] = {}
        role = {"role": "assistant", "content": self._task.echo, "refusal": None}
        first = replace(head, prompt_token_ids=job.prompts[0].input_ids) if told.token_ids else head

        def begun(
            index: int,
            delta: dict[str, Any],
            finish: answers.ChatFinishReason | None = None,
            head: answers.ChatChunk = head,
            **more: Any,
        ) -> bytes:
            """A chunk up to its `choices[0].logprobs`."""
            shown = replace(head, usage=self._usage(last)) if streaming.continuous_usage and last else head
            choice = answers.ChatChunkChoice(
                index=index, delta=answers.ChatDelta(**delta), finish_reason=finish, logprobs=None, **more
            )
            return b"data: " + opened(shown) + opened(choice)

        async def frames(index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
            last[index] = out
            choice, made = self._choices[index], list[bytes]()
            deltas = await choice.take(out, pacer)
            logprobs = openai.NO_LOGPROBS
            if (told.logprobs is not None or told.token_ids) and out.token_ids:
                logprobs = await openai.chat_logprobs(out, told.logprobs, self._service.prompts, pacer)
                deltas = deltas or [{}]  # tokens that say nothing, or whose text is held back
            ids: dict[str, Any] = {"token_ids": out.token_ids} if told.token_ids else {}
            for delta in deltas:
                made += [begun(index, delta, **ids), *logprobs, _END]
                logprobs, ids = openai.NO_LOGPROBS, {}
            if out.finish is not None:
                finish = choice.finish_reason(out.finish)
                made += [begun(index, {}, finish, matched_stop=out.finish.matched), b"null", _END]
            return made

        def closing() -> bytes:
            return (event(replace(head, usage=self._usage(last))) if streaming.usage else b"") + DONE

        return await self._service.stream(
            asked,
            inflight,
            frames,
            headers_of=lambda out: token_headers(job.prompt_tokens, out.cached_tokens),
            opening=b"".join(
                begun(index, role, head=head if index else first) + b"null" + _END for index in range(job.n)
            ),
            closing=closing,
        )


_END = b"}]}\n\n"
