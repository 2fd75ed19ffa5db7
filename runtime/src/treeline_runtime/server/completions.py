"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeline_runtime.messages import TextLogprob, TextOut
from treeline_runtime.server import openai
from treeline_runtime.server.http import DONE, Header, Request, Response, event, json_response
from treeline_runtime.server.service import Ask, Job, Service, new_rid, token_headers, usage
from treeline_runtime.tokenizer_manager import Flight

DEFAULT_MAX_TOKENS = 16


async def completions(service: Service, request: Request) -> Response | None:
    service.admit()
    raw = request.json()
    body = openai.read_completion(raw, service)
    prompts = await service.prompts.of_completion(raw, len(request.body))
    asks = [
        Ask(
            ids,
            openai.sampling(
                body, service, service.max_new_tokens(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt")
            ),
            return_logprob=body.logprobs is not None,
            logprob_start_len=0 if body.echo else -1,
            top_logprobs_num=body.logprobs or 0,
        )
        for ids in prompts
    ]
    job = Job(body.rid or new_rid("cmpl"), asks, n=body.n or 1, namespace=openai.namespace(raw))
    echoes = [service.prompts.decode(ids, skip_special_tokens=True) if body.echo else "" for ids in prompts]
    flight = service.open(job)
    try:
        if body.stream:
            await _stream(service, request, body, job, echoes, flight)
            return None
        outs = await service.collect(flight)
        choices = [_choice(_Echo(echoes[index // job.n]), index, out) for index, out in enumerate(outs)]
        answer = openai.envelope(job.rid, "text_completion", service.model_name) | {
            "choices": choices,
            "usage": usage(job, outs),
        }
        cached = sum(out.cached_tokens for out in outs[:: job.n])
        return json_response(answer, headers=token_headers(job.prompt_tokens, cached))
    finally:
        flight.close()


class _Echo:
    """The prompt's text, to come before a choice's first output, and the choice's logprobs so far."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._logprobs = openai.TextLogprobs()

    def text(self, out: TextOut) -> str:
        text, self._text = self._text + out.text, ""
        return text

    def logprobs(self, out: TextOut) -> dict[str, Any] | None:
        if out.output_token_logprobs is None and out.input_token_logprobs is None:
            return None
        chosen: list[TextLogprob] = [*(out.input_token_logprobs or []), *(out.output_token_logprobs or [])]
        tops: list[Sequence[TextLogprob] | None] = [
            *(out.input_top_logprobs or []),
            *(out.output_top_logprobs or []),
        ]
        return self._logprobs.take(chosen, tops)


def _choice(echo: _Echo, index: int, out: TextOut) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo.text(out),
        "logprobs": echo.logprobs(out),
        "finish_reason": openai.finish_reason(out.finish),
        "matched_stop": None if out.finish is None else out.finish.matched,
    }


async def _stream(
    service: Service,
    request: Request,
    body: openai.CompletionBody,
    job: Job,
    echoes: list[str],
    flight: Flight,
) -> None:
    head = openai.envelope(job.rid, "text_completion", service.model_name)
    with_usage = openai.include_usage(body)
    if with_usage:
        head["usage"] = None
    last: dict[int, TextOut] = {}
    echo = {index: _Echo(echoes[index // job.n]) for index in range(job.generations)}

    def frames(index: int, out: TextOut) -> bytes:
        last[index] = out
        choice = _choice(echo[index], index, out)
        if not choice["text"] and choice["finish_reason"] is None and choice["logprobs"] is None:
            return b""
        return event({**head, "choices": [choice]})

    def headers(out: TextOut) -> list[Header]:
        # With several prompts, what the others found in the cache is not known yet.
        return token_headers(job.prompt_tokens, out.cached_tokens) if len(job.asks) == 1 else []

    def closing() -> bytes:
        if not with_usage:
            return DONE
        counted = usage(job, [last[index] for index in sorted(last)])
        return event({**head, "choices": [], "usage": counted}) + DONE

    await service.stream(request, flight, frames, headers_of=headers, opening=b"", closing=closing)
