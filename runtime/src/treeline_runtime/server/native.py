"""SGLang's own endpoints: `/generate`, `/tokenize`, `/detokenize`, `/flush_cache`, `/abort_request`."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from msgspec import Struct

from treeline_runtime.messages import FinishReason, GenerateReq, HiddenStates, TextOut, decode_logprobs
from treeline_runtime.server import answers, native_fields, openai, schema
from treeline_runtime.server.dependencies import Controlling, Converting, Generating, ReadingRoute
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.fields import check_unknown, convert
from treeline_runtime.server.http import DONE, Answer, ApiRequest, json_answer
from treeline_runtime.server.jobs import Answered, GenerateTask, GenerationJob
from treeline_runtime.server.pacing import Pacer, elements, encode_json, open_object
from treeline_runtime.server.service import Service, token_headers
from treeline_runtime.tokenizer_manager import InflightRequest, NoReply

HIDDEN_BYTES = 10
"""What an element of a hidden state takes while an answer is made: as float32, and that as base64."""
_BASE64_AT_ONCE = 3 << 18
"""Bytes, a multiple of three: the texts of the parts put together are that of the whole."""


router = APIRouter(route_class=ReadingRoute)
administration = APIRouter()
"""Of these paths what is for operators alone."""


@router.post(
    "/generate",
    **schema.operation(
        tag=schema.NATIVE,
        summary="Go on with prompts",
        body=native_fields.GenerateBody,
        answer=answers.Generated | list[answers.Generated],
        event=answers.Generated,
    ),
)
async def generate(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "generate")
    started_at = time.monotonic()
    task = await service.read(asked, "generate", GenerateTask)
    job = task.job
    inflight = await service.open(job, asked, answer_bytes=_hidden_bytes(service, job))
    answers = _Answers(
        inflight.rids,
        [prompt for prompt in job.prompts for _ in range(job.n)],
        started_at,
        with_text=task.with_text,
        weight_version=service.state.weight_version,
        hides_cache=job.hides_cache,
    )
    if task.streaming.on:
        return await _stream(asked, task, inflight, answers)
    outs = await service.collect(inflight)
    several = task.batched or job.n > 1
    pieces, pacer = [b"[" if several else b""], Pacer()
    for index, out in enumerate(outs):
        pieces += [b"," if index else b"", *await answers.take(index, out, pacer)]
        await pacer.rest()
    headers = token_headers(job.prompt_tokens, sum(out.cached_tokens for out in outs[:: job.n]))
    return Answer([*pieces, b"]" if several else b""], headers=headers)


def _hidden_bytes(service: Service, job: GenerationJob) -> int:
    """What the hidden states of an answer may take. Raises ApiError 400 where there are none to be had."""
    if not job.prompts[0].return_hidden_states:
        return 0
    if service.hidden_size is None:
        raise ApiError(
            400,
            "Start the server with --enable-return-hidden-states to ask for them",
            param="return_hidden_states",
            code="disabled",
        )
    rows = job.n * sum(len(prompt.input_ids) + prompt.sampling.max_new_tokens for prompt in job.prompts)
    return HIDDEN_BYTES * service.hidden_size * rows


@dataclass
class _Answers:
    """Native answers are cumulative: text and lists so far, by index."""

    rids: list[str]
    prompts: list[GenerateReq]
    """What each of them answers."""
    started_at: float
    with_text: bool
    weight_version: str
    hides_cache: bool = False
    """Clients read the member, so it stays and says 0."""
    _so_far: dict[int, _SoFar] = field(default_factory=dict)

    async def take(self, index: int, out: TextOut, pacer: Pacer, *, shown_index: bool = False) -> list[bytes]:
        """Adds an output; returns the answer as it stands, as pieces of JSON.

        `shown_index`: with its index.
        """
        so_far = self._so_far.get(index)
        if so_far is None:
            so_far = self._so_far[index] = _SoFar(logprobs=_logprob_lists(self.prompts[index]))
        so_far.text += out.text
        _shorten(so_far.ids, out.withdrawn)
        _extend(so_far.ids, elements(out.token_ids))
        for raw in out.logprobs:
            known = decode_logprobs(raw)
            for name, fresh in (
                ("input_token_logprobs", known.input_tokens),
                ("output_token_logprobs", known.output_tokens),
                ("input_top_logprobs", known.input_tops),
                ("output_top_logprobs", known.output_tops),
            ):
                if fresh is not None and name in so_far.logprobs:
                    _extend(so_far.logprobs[name], elements([self._shown(item) for item in fresh]))
            await pacer.rest()
        meta = answers.MetaInfo(
            id=self.rids[index],
            finish_reason=_finish(out.finish, out.completion_tokens),
            prompt_tokens=out.prompt_tokens,
            completion_tokens=out.completion_tokens,
            cached_tokens=0 if self.hides_cache else out.cached_tokens,
            weight_version=self.weight_version,
            num_retractions=out.retractions,
            e2e_latency=time.monotonic() - self.started_at,
        )
        head = {"text": so_far.text} | ({"index": index} if shown_index else {})
        pieces = [open_object(head, "output_ids"), b"[", bytes(so_far.ids), b'],"meta_info":']
        pieces.append(encode_json(meta)[:-1])
        for name, listed in so_far.logprobs.items():
            pieces += [b',"%s":[' % name.encode(), bytes(listed), b"]"]
        if out.hidden_states is not None:
            pieces += await _hidden_states(out.hidden_states, pacer)
        return [*pieces, b"}}"]

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
    """Lists are kept as the JSON of their elements: what has been written once is not written again."""

    logprobs: dict[str, bytearray]
    text: str = ""
    ids: bytearray = field(default_factory=bytearray)


def _logprob_lists(prompt: GenerateReq) -> dict[str, bytearray]:
    """The lists of an answer, by name. SGLang's clients read them whether or not there is anything in them."""
    names: list[str] = []
    if prompt.return_logprob:
        names += ["input_token_logprobs", "output_token_logprobs"]
        if prompt.top_logprobs_num:
            names += ["input_top_logprobs", "output_top_logprobs"]
    return {name: bytearray() for name in names}


def _shorten(listed: bytearray, count: int) -> None:
    """The last `count` elements were never there."""
    for _ in range(count):
        del listed[max(listed.rfind(b","), 0) :]


def _extend(known: bytearray, fresh: bytes) -> None:
    if known and fresh:
        known += b","
    known += fresh


async def _hidden_states(states: HiddenStates, pacer: Pacer) -> list[bytes]:
    """A member of `meta_info`: rows as base64, since as JSON they would be three times as long."""
    shape = [len(states.data) // (4 * states.size), states.size]
    head = {"first_position": states.first, "shape": shape, "dtype": "float32"}
    pieces = [b',"hidden_states":', open_object(head, "data"), b'"']
    for start in range(0, len(states.data), _BASE64_AT_ONCE):
        pieces.append(base64.b64encode(states.data[start : start + _BASE64_AT_ONCE]))
        await pacer.rest()
    return [*pieces, b'"}']


def _finish(finish: FinishReason | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": finish.message or "Aborted"}


async def _stream(asked: ApiRequest, task: GenerateTask, inflight: InflightRequest, answers: _Answers) -> Response:
    several = len(inflight.rids) > 1

    async def frames(index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        return [b"data: ", *await answers.take(index, out, pacer, shown_index=several), b"\n\n"]

    return await asked.service.stream(
        asked,
        inflight,
        frames,
        headers_of=lambda out: [] if several else token_headers(task.job.prompt_tokens, out.cached_tokens),
        closing=lambda: DONE,
    )


_TOKENIZE = schema.operation(
    tag=schema.NATIVE, summary="Text → ids", body=native_fields.TokenizeBody, answer=answers.Tokens
)


@router.post("/tokenize", **_TOKENIZE)
@router.post("/v1/tokenize", **_TOKENIZE)
async def tokenize(asked: Converting) -> Response:
    return Answer((await asked.service.read(asked, "tokenize", Answered)).body)


_DETOKENIZE = schema.operation(
    tag=schema.NATIVE, summary="Ids → text", body=native_fields.DetokenizeBody, answer=answers.Text
)


@router.post("/detokenize", **_DETOKENIZE)
@router.post("/v1/detokenize", **_DETOKENIZE)
async def detokenize(asked: Converting) -> Response:
    return Answer((await asked.service.read(asked, "detokenize", Answered)).body)


@administration.post("/flush_cache")
@administration.post("/reset_prefix_cache")
async def flush_cache(asked: Controlling) -> Response:
    """Empties the prefix cache; 400 while requests run. `?timeout=S` waits up to S seconds for them to end."""
    check_unknown(asked.query_params, {"timeout"})
    check_unknown(asked.json_object(), ())
    try:
        timeout_s = float(asked.query_params.get("timeout", 0))
    except ValueError:
        timeout_s = math.nan
    if math.isnan(timeout_s):
        raise ApiError(400, "'timeout' must be a number of seconds", param="timeout")
    deadline = time.monotonic() + min(max(timeout_s, 0.0), 3600.0)
    while True:
        try:
            reply = await asked.service.manager.flush()
        except NoReply as error:
            raise ApiError(503, f"The scheduler does not answer: {error}", type="server_error") from None
        if reply.ok:
            return Answer(b"Cache flushed.\n", content_type=b"text/plain; charset=utf-8")
        if time.monotonic() >= deadline:
            raise ApiError(400, reply.message or "The cache is in use", code="cache_busy")
        await asyncio.sleep(0.05)


class AbortBody(Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


@administration.post("/abort_request")
async def abort_request(asked: Controlling) -> Response:
    """Ends one request (`rid`) or all (`abort_all`). Answers 200 whether or not there was anything to end."""
    check_unknown(asked.query_params, ())
    raw = asked.json_object()
    check_unknown(raw, frozenset(AbortBody.__struct_fields__))
    body = convert(raw, AbortBody)
    if body.abort_all == bool(body.rid):
        raise ApiError(400, "Give either 'rid' or 'abort_all': true", param="rid")
    asked.service.manager.abort(body.rid)
    return json_answer({"aborted": body.rid or "all"})
