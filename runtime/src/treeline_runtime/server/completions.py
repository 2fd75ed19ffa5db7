"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from treeline_runtime.messages import TextOut
from treeline_runtime.server import answers, openai, schema
from treeline_runtime.server.dependencies import Call, call_of
from treeline_runtime.server.errors import Header
from treeline_runtime.server.http import DONE, Answer, event
from treeline_runtime.server.jobs import CompletionTask
from treeline_runtime.server.pacing import Pacer, opened
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.service import AnswerMaker, Service, token_headers, usage

router = APIRouter()


@schema.post(
    router,
    "/v1/completions",
    tag=schema.OPENAI,
    summary="Continue prompts",
    body=openai.CompletionBody,
    answer=answers.Completion,
    event=answers.Completion,
)
async def completion(call: Annotated[Call[CompletionTask], call_of("completion", "generate")]) -> Response:
    service, asked, task = call
    size = task.n * sum(map(len, task.echoes)) + task.ids_bytes
    return await service.answer(asked, task, _Answer(service, task), answer_bytes=size)


class _Choice:
    """One choice of an answer."""

    def __init__(self, prompts: Prompts, task: CompletionTask, index: int) -> None:
        prompt = index // task.n
        self._index = index
        self._echo = task.echoes[prompt]
        self._task = task
        self._prompt_ids: list[int] | UnsetType = task.prompts[prompt].input_ids if task.token_ids else UNSET
        self._logprobs = openai.TextLogprobs(
            prompts,
            task.logprobs,
            skip_special_tokens=task.prompts[prompt].sampling.skip_special_tokens,
            echo=bool(self._echo),
        )

    async def take(self, out: TextOut, pacer: Pacer) -> list[bytes]:
        """Returns the chunks that an output adds, as pieces of JSON; [] if none. An echoed prompt comes first."""
        task = self._task
        text, self._echo = self._echo + out.text, ""
        logprobs = await self._logprobs.take(out, pacer)
        says = text or out.finish is not None or (task.token_ids and out.token_ids)
        if not says and logprobs is openai.NO_LOGPROBS:
            return []
        choice = answers.CompletionChoice(
            index=self._index,
            text=text,
            finish_reason=openai.finish_reason(out.finish),
            matched_stop=None if out.finish is None else out.finish.matched,
            token_ids=out.token_ids if task.token_ids else UNSET,
            prompt_token_ids=self._prompt_ids,
            logprobs=None,
        )
        self._prompt_ids = UNSET
        made = [opened(choice), *logprobs]
        if task.prompt_logprobs is not None:
            made += [b',"prompt_logprobs":', *await openai.prompt_logprobs(out, task.prompt_logprobs, pacer)]
        return [*made, b"}"]


class _Answer(AnswerMaker):
    def __init__(self, service: Service, task: CompletionTask) -> None:
        self._task = task
        self._choices = [_Choice(service.prompts, task, index) for index in range(task.generations)]
        self._last: dict[int, TextOut] = {}
        envelope = openai.envelope(task.rid, "text_completion", service.name_of(task))
        self._head = answers.Completion(**envelope, usage=None if task.usage else UNSET, choices=[])

    def _counted(self) -> answers.Completion:
        return replace(self._head, usage=usage(self._task, self._last))

    async def whole(self, outs: list[TextOut]) -> Answer:
        self._last = dict(enumerate(outs))
        pieces, pacer = [opened(self._counted())], Pacer()
        for index, out in enumerate(outs):
            pieces += [b"," if index else b"", *await self._choices[index].take(out, pacer)]
            await pacer.rest()
        cached = sum(out.cached_tokens for out in outs[:: self._task.n])
        return Answer([*pieces, b"]}"], headers=token_headers(self._task.prompt_tokens, cached))

    def headers(self, first: TextOut) -> list[Header]:
        # With several prompts, what the others found in the cache is not known yet.
        several = len(self._task.prompts) > 1
        return [] if several else token_headers(self._task.prompt_tokens, first.cached_tokens)

    async def frames(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        self._last[index] = out
        choice = await self._choices[index].take(out, pacer)
        if not choice:
            return []
        head = self._counted() if self._task.continuous_usage else self._head
        return [b"data: ", opened(head), *choice, b"]}\n\n"]

    def closing(self) -> bytes:
        return (event(self._counted()) if self._task.usage else b"") + DONE
