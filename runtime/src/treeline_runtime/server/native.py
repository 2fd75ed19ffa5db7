"""SGLang's `/generate`, and tokenizing."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Response

from treeline_runtime.messages import FinishReason, GenerateReq, HiddenStates, TextOut, decode_logprobs
from treeline_runtime.server import answers, native_fields, openai, schema
from treeline_runtime.server.dependencies import Call, call_of, converting
from treeline_runtime.server.errors import Header, wrong
from treeline_runtime.server.http import Answer, ApiRequest
from treeline_runtime.server.jobs import GenerateTask
from treeline_runtime.server.pacing import Pacer, elements, encode_json, open_object
from treeline_runtime.server.service import AnswerMaker, Service, token_headers

HIDDEN_BYTES = 10
"""Bytes of a hidden state's element while answering: float32, and its base64."""
_BASE64_AT_ONCE = 3 << 18
"""Bytes, a multiple of three, so that base64 parts can be joined."""

router = APIRouter()


@schema.post(
    router,
    "/generate",
    tag=schema.NATIVE,
    summary="Continue prompts",
    body=native_fields.GenerateBody,
    answer=answers.Generated | list[answers.Generated],
    event=answers.Generated,
)
async def generate(call: Annotated[Call[GenerateTask], call_of("generate", "generate")]) -> Response:
    service, asked, task = call
    made = _Answers(asked, task, service.state.weight_version)
    return await service.answer(asked, task, made, answer_bytes=_hidden_bytes(service, task))


def _hidden_bytes(service: Service, task: GenerateTask) -> int:
    """Bytes of an answer's hidden states. Raises ApiError 400 if there are none."""
    if not task.prompts[0].return_hidden_states:
        return 0
    if service.hidden_size is None:
        raise wrong(
            "return_hidden_states",
            "Start the server with --enable-return-hidden-states to ask for them",
            code="disabled",
        )
    rows = task.n * sum(len(prompt.input_ids) + prompt.sampling.max_new_tokens for prompt in task.prompts)
    return HIDDEN_BYTES * service.hidden_size * rows


schema.post(
    router,
    "/tokenize",
    "/v1/tokenize",
    tag=schema.NATIVE,
    summary="Text to token ids",
    body=native_fields.TokenizeBody,
    answer=answers.Tokens,
)(converting("tokenize"))
schema.post(
    router,
    "/detokenize",
    "/v1/detokenize",
    tag=schema.NATIVE,
    summary="Token ids to text",
    body=native_fields.DetokenizeBody,
    answer=answers.Text,
)(converting("detokenize"))


class _Answers(AnswerMaker):
    """Cumulative answers: text and lists so far, by index."""

    def __init__(self, asked: ApiRequest, task: GenerateTask, weight_version: str) -> None:
        self._task = task
        self._came_at = asked.came_at
        self._weight_version = weight_version
        self._names = task.names
        self._several = task.generations > 1
        self._so_far: dict[int, _SoFar] = {}

    async def whole(self, outs: list[TextOut]) -> Answer:
        task, listed = self._task, self._task.batched or self._task.n > 1
        pieces, pacer = [b"[" if listed else b""], Pacer()
        for index, out in enumerate(outs):
            pieces += [b"," if index else b"", *await self._take(index, out, pacer)]
            await pacer.rest()
        headers = token_headers(task.prompt_tokens, sum(out.cached_tokens for out in outs[:: task.n]))
        return Answer([*pieces, b"]" if listed else b""], headers=headers)

    def headers(self, first: TextOut) -> list[Header]:
        return [] if self._several else token_headers(self._task.prompt_tokens, first.cached_tokens)

    async def frames(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        return [b"data: ", *await self._take(index, out, pacer), b"\n\n"]

    async def _take(self, index: int, out: TextOut, pacer: Pacer) -> list[bytes]:
        """Adds an output; returns the answer so far as pieces of JSON, in a stream of several with its index."""
        so_far = self._so_far.get(index)
        if so_far is None:
            so_far = self._so_far[index] = _SoFar(logprobs=_logprob_lists(self._task.prompts[index // self._task.n]))
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
            id=self._names[index],
            finish_reason=_finish(out.finish, out.completion_tokens),
            prompt_tokens=out.prompt_tokens,
            completion_tokens=out.completion_tokens,
            cached_tokens=0 if self._task.hides_cache else out.cached_tokens,
            weight_version=self._weight_version,
            num_retractions=out.retractions,
            e2e_latency=time.monotonic() - self._came_at,
        )
        if (spec := out.speculated) is not None:
            meta.spec_verify_ct, meta.spec_draft_token_num = spec.steps, spec.guesses
            meta.spec_accept_token_num = spec.right
        head = {"text": so_far.text} | ({"index": index} if self._several and self._task.stream else {})
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
        return [openai.floor(value), id, text if self._task.with_text else None]


@dataclass
class _SoFar:
    """Lists are kept as JSON, so that elements are written once."""

    logprobs: dict[str, bytearray]
    text: str = ""
    ids: bytearray = field(default_factory=bytearray)


def _logprob_lists(prompt: GenerateReq) -> dict[str, bytearray]:
    """An answer's lists by name, also empty ones, which SGLang's clients read."""
    names: list[str] = []
    if prompt.return_logprob:
        names += ["input_token_logprobs", "output_token_logprobs"]
        if prompt.top_logprobs_num:
            names += ["input_top_logprobs", "output_top_logprobs"]
    return {name: bytearray() for name in names}


def _shorten(listed: bytearray, count: int) -> None:
    for _ in range(count):
        del listed[max(listed.rfind(b","), 0) :]


def _extend(known: bytearray, fresh: bytes) -> None:
    if known and fresh:
        known += b","
    known += fresh


async def _hidden_states(states: HiddenStates, pacer: Pacer) -> list[bytes]:
    """A member of `meta_info`: rows as base64, a third of their size as JSON."""
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
