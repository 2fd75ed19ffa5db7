"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from treeline_runtime.messages import TextOut
from treeline_runtime.server import openai
from treeline_runtime.server.http import DONE, Request, Response, event
from treeline_runtime.server.jobs import ChatTask, GenerationJob, Streaming
from treeline_runtime.server.pacing import Pacer, open_object
from treeline_runtime.server.service import Service, token_headers, usage
from treeline_runtime.tokenizer_manager import InflightRequest


async def chat_completions(service: Service, request: Request) -> Response | None:
    service.admit()
    task = await service.read(request, "chat", ChatTask)
    job = task.job
    inflight = await service.open(job)
    try:
        if task.streaming.on:
            await _stream(service, request, task.streaming, job, inflight)
            return None
        outs = await service.collect(inflight)
        return await _answer(service, job, outs)
    finally:
        inflight.close()


async def _answer(service: Service, job: GenerationJob, outs: list[TextOut]) -> Response:
    head = openai.envelope(job.rid, "chat.completion", service.model_name) | {
        "usage": usage(job, dict(enumerate(outs)))
    }
    pieces, pacer = [open_object(head, "choices"), b"["], Pacer()
    for index, out in enumerate(outs):
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": out.text, "refusal": None},
            "finish_reason": openai.finish_reason(out.finish),
            "matched_stop": None if out.finish is None else out.finish.matched,
        }
        pieces += [b"," if index else b"", open_object(choice, "logprobs")]
        pieces += [*await openai.chat_logprobs(out, service.prompts, pacer), b"}"]
    headers = token_headers(job.prompt_tokens, outs[0].cached_tokens)
    return Response([*pieces, b"]}"], headers=tuple(headers))


async def _stream(
    service: Service, request: Request, streaming: Streaming, job: GenerationJob, inflight: InflightRequest
) -> None:
    head = openai.envelope(job.rid, "chat.completion.chunk", service.model_name)
    if streaming.usage:
        head["usage"] = None
    last: dict[int, TextOut] = {}

    def counted() -> dict[str, object]:
        return usage(job, last)

    def begun(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        """A chunk up to its `choices[0].logprobs`."""
        shown = head | {"usage": counted()} if streaming.continuous_usage and last else head
        choice = {"index": index, "delta": delta, "finish_reason": finish, **more}
        return b"data: " + open_object(shown, "choices") + b"[" + open_object(choice, "logprobs")

    async def frames(index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        last[index] = out
        made = list[bytes]()
        if out.text or (out.logprobs and out.token_ids):
            logprobs = await openai.chat_logprobs(out, service.prompts, pacer)
            made += [begun(index, {"content": out.text}), *logprobs, _END]
        if out.finish is not None:
            finish = openai.finish_reason(out.finish)
            made += [begun(index, {}, finish, matched_stop=out.finish.matched), b"null", _END]
        return made

    def closing() -> bytes:
        return (event({**head, "choices": [], "usage": counted()}) if streaming.usage else b"") + DONE

    role = {"role": "assistant", "content": "", "refusal": None}
    await service.stream(
        request,
        inflight,
        frames,
        headers_of=lambda out: token_headers(job.prompt_tokens, out.cached_tokens),
        opening=b"".join(begun(index, role) + b"null" + _END for index in range(job.n)),
        closing=closing,
    )


_END = b"}]}\n\n"
