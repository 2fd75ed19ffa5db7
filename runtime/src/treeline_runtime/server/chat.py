"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from treeline_runtime.messages import TextOut
from treeline_runtime.server import openai
from treeline_runtime.server.http import DONE, Request, Response, event, json_response
from treeline_runtime.server.service import Ask, Job, Service, new_rid, token_headers, usage
from treeline_runtime.tokenizer_manager import Flight


async def chat_completions(service: Service, request: Request) -> Response | None:
    service.admit()
    raw = request.json()
    body = openai.read_chat(raw, service)
    ids = await service.prompts.of_chat(raw, len(request.body))
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    most = service.max_new_tokens(len(ids), asked, None, "messages")
    ask = Ask(
        ids,
        openai.sampling(body, service, most),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
    )
    job = Job(body.rid or new_rid("chatcmpl"), [ask], n=body.n or 1, namespace=openai.namespace(raw))
    flight = service.open(job)
    try:
        if body.stream:
            await _stream(service, request, body, job, flight)
            return None
        outs = await service.collect(flight)
        answer = openai.envelope(job.rid, "chat.completion", service.model_name) | {
            "choices": [_choice(service, index, out) for index, out in enumerate(outs)],
            "usage": usage(job, outs),
        }
        return json_response(answer, headers=token_headers(len(ids), outs[0].cached_tokens))
    finally:
        flight.close()


def _choice(service: Service, index: int, out: TextOut) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": out.text, "refusal": None},
        "logprobs": openai.chat_logprobs(out, service.prompts),
        "finish_reason": openai.finish_reason(out.finish),
        "matched_stop": None if out.finish is None else out.finish.matched,
    }


async def _stream(
    service: Service, request: Request, body: openai.ChatBody, job: Job, flight: Flight
) -> None:
    head = openai.envelope(job.rid, "chat.completion.chunk", service.model_name)
    with_usage = openai.include_usage(body)
    if with_usage:
        head["usage"] = None
    last: dict[int, TextOut] = {}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return event({**head, "choices": [choice]})

    def frames(index: int, out: TextOut) -> bytes:
        last[index] = out
        logprobs = openai.chat_logprobs(out, service.prompts)
        made = b""
        if out.text or (logprobs and logprobs["content"]):
            made = chunk(index, {"content": out.text}, logprobs=logprobs)
        if out.finish is not None:
            made += chunk(index, {}, openai.finish_reason(out.finish), matched_stop=out.finish.matched)
        return made

    def closing() -> bytes:
        if not with_usage:
            return DONE
        counted = usage(job, [last[index] for index in sorted(last)])
        return event({**head, "choices": [], "usage": counted}) + DONE

    await service.stream(
        request,
        flight,
        frames,
        headers_of=lambda out: token_headers(job.prompt_tokens, out.cached_tokens),
        opening=b"".join(
            chunk(i, {"role": "assistant", "content": "", "refusal": None}) for i in range(job.n)
        ),
        closing=closing,
    )
