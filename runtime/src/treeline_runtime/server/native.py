"""SGLang's own endpoints: `/generate`, `/tokenize`, `/detokenize`, `/flush_cache`, `/abort_request`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct
from treeline_wire.prompt import Prompt, PromptError, prompt_of_completion

from treeline_runtime.messages import FinishReason, SamplingParams, TextOut
from treeline_runtime.server import openai
from treeline_runtime.server.fields import check_unknown, convert
from treeline_runtime.server.http import DONE, ApiError, Request, Response, event, json_response
from treeline_runtime.server.sampling import MAX_TOP_LOGPROBS, Count, SamplingFields, Seed, TokenId
from treeline_runtime.server.service import Ask, Job, Service, new_rid, token_headers
from treeline_runtime.tokenizer_manager import Flight, NoReply

DEFAULT_MAX_NEW_TOKENS = 128
WEIGHT_VERSION = "default"

StartLen = Annotated[int, Meta(ge=-1, le=1 << 31)]
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class NativeSampling(SamplingFields, frozen=True):
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None


class GenerateBody(Struct, frozen=True):
    """What of a `/generate` request we act on. Lists make a batch; one value then counts for all its members."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[Any] | None = None
    rid: openai.Rid | list[openai.Rid] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: TopCount | list[TopCount] | None = None
    return_text_in_logprobs: bool | None = None


_GENERATE_FIELDS = frozenset(GenerateBody.__struct_fields__) | openai.NAMESPACE_FIELDS
_SAMPLING_FIELDS = frozenset(NativeSampling.__struct_fields__)


async def generate(service: Service, request: Request) -> Response | None:
    service.admit()
    started_at = time.monotonic()
    raw = request.json()
    check_unknown(raw, _GENERATE_FIELDS)
    body = convert(raw, GenerateBody)
    prompts, batched = await _prompts(service, body, len(request.body))
    asks, n = _asks(service, body, prompts)
    rids = body.rid if isinstance(body.rid, list) else None
    if rids is not None and len(rids) != len(asks) * n:
        raise ApiError(400, f"{len(rids)} rids for {len(asks) * n} generations", param="rid")
    name = body.rid if isinstance(body.rid, str) else new_rid("gen")
    job = Job(name, asks, n=n, namespace=openai.namespace(raw), rids=rids)
    flight = service.open(job)
    try:
        answers = _Answers(flight.rids, started_at, with_text=bool(body.return_text_in_logprobs))
        if body.stream:
            await _stream(service, request, job, flight, answers)
            return None
        outs = await service.collect(flight)
        made = [answers.take(index, out) for index, out in enumerate(outs)]
        headers = token_headers(job.prompt_tokens, sum(out.cached_tokens for out in outs[::n]))
        return json_response(made if batched or n > 1 else made[0], headers=headers)
    finally:
        flight.close()


async def _prompts(service: Service, body: GenerateBody, size: int) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether the request was a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "Give exactly one of 'text' and 'input_ids'", param="text")
    name = "text" if body.text is not None else "input_ids"
    value = body.text if body.text is not None else body.input_ids
    try:
        prompts = prompt_of_completion({"prompt": value})
    except PromptError as error:
        raise ApiError(400, f"Invalid value for {name!r}: {error}", param=name) from None
    if name == "input_ids" and any(prompt.ids is None for prompt in prompts):
        raise ApiError(400, "'input_ids' holds token ids, not text", param="input_ids")
    batched = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    return await service.prompts.of_prompts(prompts, size), batched


def _asks(service: Service, body: GenerateBody, prompts: list[list[int]]) -> tuple[list[Ask], int]:
    """What is wanted for each prompt, and `n`, which must be the same for all."""
    count = len(prompts)
    columns = zip(
        prompts,
        _each(body.sampling_params, count, "sampling_params"),
        _each(body.return_logprob, count, "return_logprob"),
        _each(body.logprob_start_len, count, "logprob_start_len"),
        _each(body.top_logprobs_num, count, "top_logprobs_num"),
        strict=True,
    )
    asks: list[Ask] = []
    ns: set[int] = set()
    for ids, params, logprob, start, top in columns:
        sampling, n = _sampling(service, params, len(ids))
        if start is not None and start >= len(ids):
            raise ApiError(
                400,
                f"'logprob_start_len' is {start}, but the prompt has {len(ids)} tokens",
                param="logprob_start_len",
            )
        asks.append(Ask(ids, sampling, bool(logprob), -1 if start is None else start, top or 0))
        ns.add(n)
    if len(ns) > 1:
        raise ApiError(400, "'n' must be the same for all prompts of a batch", param="sampling_params.n")
    return asks, ns.pop()


def _each(value: Any, count: int, param: str) -> list[Any]:
    """A value for every prompt: its own, or the one for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"{len(value)} values of {param!r} for {count} prompts", param=param)
    return value


def _sampling(service: Service, params: Any, prompt_len: int) -> tuple[SamplingParams, int]:
    """One prompt's `sampling_params`, and the `n` among them."""
    fields = {} if params is None else params
    if not isinstance(fields, dict):
        raise ApiError(400, "'sampling_params' must be an object", param="sampling_params")
    check_unknown(fields, _SAMPLING_FIELDS)
    typed = convert(fields, NativeSampling, "sampling_params.")
    most = service.max_new_tokens(prompt_len, typed.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, "text")
    made = typed.params(
        service.defaults,
        service.prompts.vocab_size,
        max_new_tokens=most,
        min_new_tokens=typed.min_new_tokens,
        seed=typed.sampling_seed,
        min_param="sampling_params.min_new_tokens",
        where="sampling_params.",
    )
    return made, typed.n or 1


@dataclass
class _Answers:
    """Native answers are cumulative: text and lists so far, by index."""

    rids: list[str]
    started_at: float
    with_text: bool
    _so_far: dict[int, _SoFar] = field(default_factory=dict)

    def take(self, index: int, out: TextOut) -> dict[str, Any]:
        """Adds an output; returns the answer as it stands."""
        so_far = self._so_far.setdefault(index, _SoFar())
        so_far.text += out.text
        so_far.ids += out.token_ids
        meta: dict[str, Any] = {
            "id": self.rids[index],
            "finish_reason": _finish(out.finish, out.completion_tokens),
            "prompt_tokens": out.prompt_tokens,
            "completion_tokens": out.completion_tokens,
            "cached_tokens": out.cached_tokens,
            "weight_version": WEIGHT_VERSION,
            "num_retractions": out.retractions,
            "e2e_latency": time.monotonic() - self.started_at,
        }
        for name in _LOGPROB_LISTS:
            fresh = getattr(out, name)
            if fresh is not None:
                so_far.logprobs.setdefault(name, []).extend(self._shown(item) for item in fresh)
        return {"text": so_far.text, "output_ids": list(so_far.ids), "meta_info": meta | so_far.logprobs}

    def _shown(self, item: Any) -> Any:
        """A triple (logprob, id, text), or a list of them for the top ones."""
        if item is None:
            return None
        if isinstance(item, list):
            return [self._shown(one) for one in item]
        value, id, text = item
        return [openai.floor(value), id, text if self.with_text else None]


@dataclass
class _SoFar:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)


_LOGPROB_LISTS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
)


def _finish(finish: FinishReason | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": finish.message or "Aborted"}


async def _stream(service: Service, request: Request, job: Job, flight: Flight, answers: _Answers) -> None:
    several = len(flight.rids) > 1

    def frames(index: int, out: TextOut) -> bytes:
        answer = answers.take(index, out)
        return event(answer | {"index": index} if several else answer)

    await service.stream(
        request,
        flight,
        frames,
        headers_of=lambda out: [] if several else token_headers(job.prompt_tokens, out.cached_tokens),
        opening=b"",
        closing=lambda: DONE,
    )


class TokenizeBody(Struct, frozen=True):
    prompt: str | list[str] | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeBody(Struct, frozen=True):
    tokens: list[Any]
    """Ids, or lists of ids."""
    skip_special_tokens: bool | None = None
    model: str | None = None


class _OneList(Struct, frozen=True):
    tokens: list[TokenId]


class _ManyLists(Struct, frozen=True):
    tokens: list[list[TokenId]]


_TOKENIZE_FIELDS = frozenset(TokenizeBody.__struct_fields__) | openai.TEMPLATE_FIELDS
_DETOKENIZE_FIELDS = frozenset(DetokenizeBody.__struct_fields__)


async def tokenize(service: Service, request: Request) -> Response:
    """`{"prompt": text or texts}`, or `{"messages": …}` as in a chat → `tokens`, `count`, `max_model_len`."""
    raw = request.json()
    check_unknown(raw, _TOKENIZE_FIELDS)
    body = convert(raw, TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give exactly one of 'prompt' and 'messages'", param="prompt")
    if body.messages is not None:
        tokens: Any = await service.prompts.of_chat(raw, len(request.body))
        count: Any = len(tokens)
    else:
        special = body.add_special_tokens is not False
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        prompts = [Prompt(text=text, add_special_tokens=special) for text in texts]
        lists = await service.prompts.of_prompts(prompts, len(request.body))
        single = isinstance(body.prompt, str)
        tokens = lists[0] if single else lists
        count = len(lists[0]) if single else [len(ids) for ids in lists]
    limit = service.limits.context_length if service.limits is not None else None
    return json_response({"tokens": tokens, "count": count, "max_model_len": limit})


async def detokenize(service: Service, request: Request) -> Response:
    """`{"tokens": ids or lists of ids}` → `text`."""
    raw = request.json()
    check_unknown(raw, _DETOKENIZE_FIELDS)
    body = convert(raw, DetokenizeBody)
    service.check_model(body.model)
    skip = body.skip_special_tokens is not False
    if body.tokens and isinstance(body.tokens[0], list):
        texts = [_text_of(service, ids, skip) for ids in convert(raw, _ManyLists).tokens]
        return json_response({"text": texts})
    return json_response({"text": _text_of(service, convert(raw, _OneList).tokens, skip)})


def _text_of(service: Service, ids: Sequence[int], skip_special_tokens: bool) -> str:
    for id in ids:
        if id >= service.prompts.vocab_size:
            raise ApiError(400, f"Token id {id} is not below {service.prompts.vocab_size}", param="tokens")
    return service.prompts.decode(ids, skip_special_tokens=skip_special_tokens)


async def flush_cache(service: Service, request: Request) -> Response:
    """Empties the prefix cache; 400 while requests run. `?timeout=S` waits up to S seconds for them to end."""
    try:
        timeout_s = float(request.query.get("timeout", 0))
    except ValueError:
        timeout_s = math.nan
    if math.isnan(timeout_s):
        raise ApiError(400, "'timeout' must be a number of seconds", param="timeout")
    deadline = time.monotonic() + min(max(timeout_s, 0.0), 3600.0)
    while True:
        try:
            reply = await service.manager.flush()
        except NoReply as error:
            raise ApiError(503, f"The scheduler does not answer: {error}", type="server_error") from None
        if reply.ok:
            return Response(b"Cache flushed.\n", content_type=b"text/plain; charset=utf-8")
        if time.monotonic() >= deadline:
            raise ApiError(400, reply.message or "The cache is in use", code="cache_busy")
        await asyncio.sleep(0.05)


class AbortBody(Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


async def abort_request(service: Service, request: Request) -> Response:
    """Ends one request (`rid`) or all (`abort_all`). Answers 200 whether or not there was anything to end."""
    raw: Mapping[str, Any] = request.json()
    check_unknown(raw, frozenset(AbortBody.__struct_fields__))
    body = convert(raw, AbortBody)
    if body.abort_all == bool(body.rid):
        raise ApiError(400, "Give either 'rid' or 'abort_all': true", param="rid")
    service.manager.abort(body.rid)
    return json_response({"aborted": body.rid or "all"})
