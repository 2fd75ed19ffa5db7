"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from treeline_runtime.messages import TextOut
from treeline_runtime.server import answers, openai, schema
from treeline_runtime.server.dependencies import Generating, ReadingRoute
from treeline_runtime.server.errors import Header
from treeline_runtime.server.http import DONE, Answer, ApiRequest, event
from treeline_runtime.server.jobs import CompletionTask
from treeline_runtime.server.pacing import Pacer, opened
from treeline_runtime.server.service import Service, token_headers, usage
from treeline_runtime.tokenizer_manager import InflightRequest

router = APIRouter(route_class=ReadingRoute)


@router.post(
    "/v1/completions",
    **schema.operation(
        tag=schema.OPENAI,
        summary="Go on with prompts",
        body=openai.CompletionBody,
        answer=answers.Completion,
        event=answers.Completion,
    ),
)
async def completions(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "generate")
    task = await service.read(asked, "completion", CompletionTask)
    size = task.job.n * sum(map(len, task.echoes)) + task.told.size(task.job)
    inflight = await service.open(task.job, asked, answer_bytes=size)
    choices = [_Choice(service, task, index) for index in range(task.job.generations)]
    if task.streaming.on:
        return await _stream(asked, task, choices, inflight)
    return await _answer(service, task, choices, await service.collect(inflight))


class _Choice:
    """One choice of an answer, as its outputs come."""

    def __init__(self, service: Service, task: CompletionTask, index: int) -> None:
        job = task.job
        prompt = index // job.n
        self._index = index
        self._echo = task.echoes[prompt]
        self._told = task.told
        self._prompt_ids: list[int] | UnsetType = job.prompts[prompt].input_ids if task.told.token_ids else UNSET
        self._logprobs = openai.TextLogprobs(
            service.prompts,
            task.told.logprobs,
            skip_special_tokens=job.prompts[prompt].sampling.skip_special_tokens,
            echo=bool(self._echo),
        )

    async def take(self, out: TextOut, pacer: Pacer) -> list[bytes]:
        """What an output adds, as pieces of JSON; [] when it says nothing. An echoed prompt comes first."""
        text, self._echo = self._echo + out.text, ""
        logprobs = await self._logprobs.take(out, pacer)
        says = text or out.finish is not None or (self._told.token_ids and out.token_ids)
        if not says and logprobs is openai.NO_LOGPROBS:
            return []
        choice = answers.CompletionChoice(
            index=self._index,
            text=text,
            finish_reason=openai.finish_reason(out.finish),
            matched_stop=None if out.finish is None else out.finish.matched,
            token_ids=out.token_ids if self._told.token_ids else UNSET,
            prompt_token_ids=self._prompt_ids,
            logprobs=None,
        )
        self._prompt_ids = UNSET
        made = [opened(choice), *logprobs]
        if self._told.prompt_logprobs is not None:
            made += [b',"prompt_logprobs":', *await openai.prompt_logprobs(out, self._told.prompt_logprobs, pacer)]
        return [*made, b"}"]


async def _answer(service: Service, task: CompletionTask, choices: list[_Choice], outs: list[TextOut]) -> Answer:
    job = task.job
    envelope = openai.envelope(job.rid, "text_completion", service.model_name)
    head = answers.Completion(**envelope, usage=usage(job, dict(enumerate(outs))), choices=[])
    pieces, pacer = [opened(head)], Pacer()
    for index, (choice, out) in enumerate(zip(choices, outs, strict=True)):
        pieces += [b"," if index else b"", *await choice.take(out, pacer)]
        await pacer.rest()
    cached = sum(out.cached_tokens for out in outs[:: job.n])
    return Answer([*pieces, b"]}"], headers=token_headers(job.prompt_tokens, cached))


async def _stream(
    asked: ApiRequest, task: CompletionTask, choices: list[_Choice], inflight: InflightRequest
) -> Response:
    service, job, streaming = asked.service, task.job, task.streaming
    envelope = openai.envelope(job.rid, "text_completion", service.model_name)
    head = answers.Completion(**envelope, usage=None if streaming.usage else UNSET, choices=[])
    last: dict[int, TextOut] = {}

    def counted() -> answers.Completion:
        return replace(head, usage=usage(job, last))

    async def frames(index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        last[index] = out
        choice = await choices[index].take(out, pacer)
        if not choice:
            return []
        return [b"data: ", opened(counted() if streaming.continuous_usage else head), *choice, b"]}\n\n"]

    def headers(out: TextOut) -> list[Header]:
        # With several prompts, what the others found in the cache is not known yet.
        return token_headers(job.prompt_tokens, out.cached_tokens) if len(job.prompts) == 1 else []

    def closing() -> bytes:
        return (event(counted()) if streaming.usage else b"") + DONE

    return await service.stream(asked, inflight, frames, headers_of=headers, closing=closing)
