"""What `/v1/chat/completions` and `/v1/completions` share: typed bodies, and the pieces of their answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from treeline_wire.prompt import PromptError, namespace_of

from treeline_runtime.messages import (
    CustomProcessor,
    FinishReason,
    SamplingParams,
    TextLogprob,
    TextOut,
    decode_logprobs,
)
from treeline_runtime.server import grammars, tools
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.fields import check_unknown, convert
from treeline_runtime.server.grammars import Constraint
from treeline_runtime.server.jobs import Caller, Streaming
from treeline_runtime.server.pacing import Pacer, elements
from treeline_runtime.server.processors import read_processor
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.sampling import Count, PositiveCount, Priority, SamplingFields, Seed, TopCount

if TYPE_CHECKING:
    from treeline_runtime.server.reader import Reader

Rid = Annotated[str, Meta(min_length=1, max_length=128)]


ChatTemplateText = Annotated[str, Meta(max_length=32 << 10)]
"""Known ones have up to 20 thousand characters."""


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk: vLLM's, sent by guidellm and aiperf."""


STREAM_HINTS = {"include_obfuscation": "padding, so that nobody sees in encrypted packets how long a token is"}


class CommonBody(SamplingFields, frozen=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: Seed | None = None
    min_tokens: Count | None = None
    rid: Rid | None = None
    request_id: Rid | None = None
    """vLLM's name of `rid`."""
    priority: Priority | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    """vLLM's name of `custom_params`."""
    return_token_ids: bool | None = None
    """vLLM's, as the next."""
    prompt_logprobs: TopCount | None = None


class ChatBody(CommonBody, frozen=True):
    """What of a chat request we act on, besides `TEMPLATE_FIELDS`, `tools.FIELDS` and `grammars.FIELDS`."""

    messages: Any = None
    chat_template: ChatTemplateText | None = None
    """In place of the model's: vLLM's."""
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    include_reasoning: bool | None = None
    """Show what was thought at all: vLLM's."""
    separate_reasoning: bool | None = None
    """Apart from what is said: SGLang's."""
    stream_reasoning: bool | None = None
    """As it comes: SGLang's."""
    echo: bool | None = None
    """The message that the answer goes on with comes first: vLLM's."""


class CompletionBody(CommonBody, frozen=True):
    """What of a completion request we act on."""

    prompt: Any = None
    max_tokens: Count | None = None
    logprobs: TopCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


NAMESPACE_FIELDS = frozenset({"cache_salt", "extra_key"})
"""Read, and checked, by wire's `namespace_of`."""
MAX_SALT_CHARS = 1024
"""It is kept with every page, and told to every router."""
TEMPLATE_FIELDS = frozenset({"documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"})
"""Read, and checked, by wire's `prompt_of_chat`."""

CHAT_FIELDS = (
    frozenset(ChatBody.__struct_fields__) | NAMESPACE_FIELDS | TEMPLATE_FIELDS | tools.FIELDS | grammars.FIELDS
)
COMPLETION_FIELDS = frozenset(CompletionBody.__struct_fields__) | NAMESPACE_FIELDS | grammars.FIELDS
EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
"""Of chat templates: an effort sets them all (`treeline_wire.dialects.treeline`)."""


def read_chat(body: Mapping[str, Any], reader: Reader) -> ChatBody:
    """Raises ApiError 400 or 404."""
    known = CHAT_FIELDS
    typed = convert(body, ChatBody)
    reader.prompts.check_place(typed.chat_template)
    if body.get("reasoning_effort") and not reader.prompts.variables(typed.chat_template).isdisjoint(EFFORT_VARIABLES):
        known |= {"reasoning_effort"}
    _check_common(body, typed, reader, known)
    if typed.messages is None:
        raise ApiError(
            400, "Missing required parameter: 'messages'", param="messages", code="missing_required_parameter"
        )
    both = typed.max_tokens is not None and typed.max_completion_tokens is not None
    if both and typed.max_tokens != typed.max_completion_tokens:
        raise ApiError(400, "'max_tokens' and 'max_completion_tokens' contradict each other", param="max_tokens")
    if typed.top_logprobs and not typed.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return typed


def read_completion(body: Mapping[str, Any], reader: Reader) -> CompletionBody:
    """Raises ApiError 400 or 404."""
    if body.get("logprobs") is False:  # chat's spelling of "none"
        body = {**body, "logprobs": None}
    typed = convert(body, CompletionBody)
    _check_common(body, typed, reader, COMPLETION_FIELDS)
    if typed.prompt is None:
        raise ApiError(400, "Missing required parameter: 'prompt'", param="prompt", code="missing_required_parameter")
    return typed


def _check_common(body: Mapping[str, Any], typed: CommonBody, reader: Reader, known: frozenset[str]) -> None:
    check_unknown(body, known)
    reader.check_model(typed.model)
    if typed.stream_options is not None:
        if not typed.stream:
            raise ApiError(400, "'stream_options' is only allowed with 'stream': true", param="stream_options")
        convert(typed.stream_options, StreamOptions, "stream_options.")
        known = frozenset(StreamOptions.__struct_fields__)
        check_unknown(typed.stream_options, known, harmless=STREAM_HINTS, where="stream_options.")


def streaming(body: CommonBody) -> Streaming:
    options = convert(body.stream_options or {}, StreamOptions, "stream_options.")
    return Streaming(bool(body.stream), bool(options.include_usage), bool(options.continuous_usage_stats))


def rid_of(body: CommonBody, kind: str) -> str:
    """The request's id, in either spelling, or a new one. Raises ApiError 400."""
    if None not in (body.rid, body.request_id) and body.rid != body.request_id:
        raise ApiError(400, "'rid' and 'request_id' contradict each other", param="request_id", code="invalid_value")
    return body.rid or body.request_id or new_rid(kind)


def new_rid(kind: str) -> str:
    """A request id that no other request has, as clients see it."""
    return f"{kind}-{uuid.uuid4().hex}"


def encodable(text: str) -> str:
    """The text. Raises ApiError 400 for half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "'prompt' contains half of a surrogate pair", param="prompt") from None
    return text


def namespace(body: Mapping[str, Any], caller: Caller) -> str | None:
    """The cache that the request uses. Raises ApiError 400."""
    for name in NAMESPACE_FIELDS & body.keys():
        if isinstance(body[name], str) and len(body[name]) > MAX_SALT_CHARS:
            raise ApiError(400, f"{name!r} has more than {MAX_SALT_CHARS} characters", param=name)
    try:
        return namespace_of(body, caller.tenant)
    except PromptError as error:
        raise ApiError(400, f"Invalid value for {error.param!r}: {error}", param=error.param) from None


def sampling(
    body: CommonBody,
    reader: Reader,
    max_new_tokens: int,
    constraint: Constraint | None = None,
    processor: CustomProcessor | None = None,
) -> SamplingParams:
    return body.params(
        reader.defaults,
        reader.prompts,
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
        constraint=constraint,
        processor=processor,
    )


def processor(body: CommonBody) -> CustomProcessor | None:
    """What is to change its logits. Raises ApiError 400."""
    given = {"custom_params": body.custom_params, "vllm_xargs": body.vllm_xargs}
    return read_processor({"custom_logit_processor": body.custom_logit_processor}, given)


def envelope(id: str, object: str, model: str) -> dict[str, Any]:
    """The members that begin an answer and each of its chunks."""
    return {"id": id, "object": object, "created": int(time.time()), "model": model}


def finish_reason(finish: FinishReason | None) -> str | None:
    """`stop`, `length`, or `abort` for a request that an operator ended."""
    return None if finish is None else finish.type


NO_LOGPROBS = [b"null"]


async def prompt_logprobs(out: TextOut, top: int, pacer: Pacer) -> list[bytes]:
    """vLLM's form as pieces of JSON: an object by token id for each token of the prompt but the first. The rank is told
    of the `top` likeliest, and null for a token that is none of them."""
    pieces = list[bytes]()
    for raw in out.logprobs:
        known = decode_logprobs(raw)
        chosen = known.input_tokens or []
        shown = [
            None if one[0] is None else _ranked(one, (tops or [])[:top])
            for one, tops in zip(chosen, known.input_tops or [None] * len(chosen), strict=True)
        ]
        pieces += [b",", elements(shown)] if shown else []
        await pacer.rest()
    return [b"[", *pieces[1:], b"]"]


def _ranked(one: TextLogprob, tops: Sequence[TextLogprob]) -> dict[str, Any]:
    ranks: dict[int, int | None] = {id: rank for rank, (_, id, _) in enumerate(tops, 1)}
    return {
        str(id): {"logprob": floor(value), "rank": ranks.get(id), "decoded_token": text}
        for value, id, text in (one, *tops)
    }


async def chat_logprobs(out: TextOut, top: int | None, prompts: Prompts, pacer: Pacer) -> list[bytes]:
    """OpenAI's chat form as pieces of JSON: `null` when none were asked for."""
    if not out.logprobs or top is None:
        return NO_LOGPROBS
    parts = list[bytes]()
    for raw in out.logprobs:
        known = decode_logprobs(raw)
        chosen = known.output_tokens or []
        tops = known.output_tops or [[] for _ in chosen]
        content = [
            {**_entry(one, prompts), "top_logprobs": [_entry(other, prompts) for other in likeliest[:top]]}
            for one, likeliest in zip(chosen, tops, strict=True)
        ]
        if content:
            parts += [b",", elements(content)]
        await pacer.rest()
    return [b'{"refusal":null,"content":[', *parts[1:], b"]}"]


def _entry(logprob: TextLogprob, prompts: Prompts) -> dict[str, Any]:
    value, id, text = logprob
    return {"token": text or "", "logprob": floor(value), "bytes": prompts.bytes_of(id, text or "")}


def floor(value: float | None) -> float | None:
    """JSON has no infinity: a token that sampling excluded is as improbable as OpenAI's API can say."""
    return None if value is None else max(value, -9999.0)


class TextLogprobs:
    """OpenAI's completions form, which counts text offsets through the whole answer: one per choice."""

    def __init__(self, prompts: Prompts, top: int | None, *, skip_special_tokens: bool, echo: bool) -> None:
        """`top`: how many of the likeliest are shown; None: nothing is. `skip_special_tokens`: of the output; an echoed
        prompt shows them."""
        self._prompts = prompts
        self._top = top
        self._echo = echo
        self._skip = skip_special_tokens
        self._offset = 0
        self._begun = False

    async def take(self, out: TextOut, pacer: Pacer) -> list[bytes]:
        """Pieces of JSON: `null` when none were asked for."""
        if not out.logprobs or self._top is None:
            return NO_LOGPROBS
        columns: dict[str, list[bytes]] = {
            name: [] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
        for raw in out.logprobs:
            known = decode_logprobs(raw)
            for chosen, tops, skip in (
                (known.input_tokens, known.input_tops, False),
                (known.output_tokens, known.output_tops, self._skip),
            ):
                if not chosen or (chosen is known.input_tokens and not self._echo):
                    continue
                columns["tokens"].append(elements([text or "" for _, _, text in chosen]))
                columns["token_logprobs"].append(elements([floor(value) for value, _, _ in chosen]))
                columns["text_offset"].append(elements([self._next_offset(one, skip) for one in chosen]))
                if tops:
                    columns["top_logprobs"].append(elements([_by_text(top and top[: self._top]) for top in tops]))
            await pacer.rest()
        pieces = list[bytes]()
        for name, slices in columns.items():
            pieces += [b"," if pieces else b"{", b'"%s":' % name.encode()]
            if name == "top_logprobs" and not slices:
                pieces.append(b"null")
            else:
                pieces += [b"[", b",".join(slices), b"]"]
        return [*pieces, b"}"]

    def _next_offset(self, logprob: TextLogprob, skip_special_tokens: bool) -> int:
        """Where this token begins in the text, in characters."""
        _, id, text = logprob
        offset = self._offset
        self._offset += self._prompts.chars_of(id, text or "", skip_special_tokens=skip_special_tokens)
        if not self._begun:
            self._begun = True
            if self._prompts.drops_first_space and self._prompts.bytes_of(id, "")[:1] == [0x20]:
                self._offset -= 1
        return offset


def _by_text(top: Sequence[TextLogprob] | None) -> dict[str, float | None] | None:
    if top is None:
        return None
    found: dict[str, float | None] = {}
    for value, _, text in top:
        found.setdefault(text or "", floor(value))  # two ids may share a text: the likelier one comes first
    return found
