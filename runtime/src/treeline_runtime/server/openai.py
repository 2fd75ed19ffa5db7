"""What `/v1/chat/completions` and `/v1/completions` share: typed bodies, and the pieces of their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from treeline_wire.prompt import PromptError, namespace_of

from treeline_runtime.messages import FinishReason, SamplingParams, TextLogprob, TextOut
from treeline_runtime.server.fields import check_unknown, convert, is_neutral
from treeline_runtime.server.http import ApiError
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.sampling import MAX_TOP_LOGPROBS, Count, PositiveCount, SamplingFields, Seed
from treeline_runtime.server.service import Service

Rid = Annotated[str, Meta(min_length=1, max_length=128)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class CommonBody(SamplingFields, frozen=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: Seed | None = None
    min_tokens: Count | None = None
    rid: Rid | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None


class ChatBody(CommonBody, frozen=True):
    """What of a chat request we act on, besides `TEMPLATE_FIELDS`."""

    messages: Any = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class CompletionBody(CommonBody, frozen=True):
    """What of a completion request we act on."""

    prompt: Any = None
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


NAMESPACE_FIELDS = frozenset({"cache_salt", "extra_key"})
"""Read, and checked, by wire's `namespace_of`."""
TEMPLATE_FIELDS = frozenset(
    {"documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
)
"""Read, and checked, by wire's `prompt_of_chat`."""

_CHAT_FIELDS = frozenset(ChatBody.__struct_fields__) | NAMESPACE_FIELDS | TEMPLATE_FIELDS
_COMPLETION_FIELDS = frozenset(CompletionBody.__struct_fields__) | NAMESPACE_FIELDS


def read_chat(body: Mapping[str, Any], service: Service) -> ChatBody:
    """Raises ApiError 400 or 404."""
    known = _CHAT_FIELDS
    if service.prompts.template_reads("reasoning_effort"):
        known |= {"reasoning_effort"}
    typed = convert(body, ChatBody)
    _check_common(body, typed, service, known)
    if typed.messages is None:
        raise ApiError(
            400, "Missing required parameter: 'messages'", param="messages", code="missing_required_parameter"
        )
    both = typed.max_tokens is not None and typed.max_completion_tokens is not None
    if both and typed.max_tokens != typed.max_completion_tokens:
        raise ApiError(
            400, "'max_tokens' and 'max_completion_tokens' contradict each other", param="max_tokens"
        )
    if typed.top_logprobs and not typed.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return typed


def read_completion(body: Mapping[str, Any], service: Service) -> CompletionBody:
    """Raises ApiError 400 or 404."""
    if body.get("logprobs") is False:  # chat's spelling of "none"
        body = {**body, "logprobs": None}
    typed = convert(body, CompletionBody)
    _check_common(body, typed, service, _COMPLETION_FIELDS)
    if typed.prompt is None:
        raise ApiError(
            400, "Missing required parameter: 'prompt'", param="prompt", code="missing_required_parameter"
        )
    return typed


def _check_common(
    body: Mapping[str, Any], typed: CommonBody, service: Service, known: frozenset[str]
) -> None:
    check_unknown(body, known)
    service.check_model(typed.model)
    if typed.functions or (typed.tools and body.get("tool_choice") != "none"):
        name = "functions" if typed.functions else "tools"
        raise ApiError(
            400, f"{name!r} is not supported by this server", param=name, code="unsupported_parameter"
        )
    if typed.stream_options is not None:
        if not typed.stream:
            raise ApiError(
                400, "'stream_options' is only allowed with 'stream': true", param="stream_options"
            )
        convert(typed.stream_options, StreamOptions, "stream_options.")
        for name, value in typed.stream_options.items():
            if name != "include_usage" and not is_neutral(name, value):
                raise ApiError(
                    400, f"'stream_options.{name}' is not supported", param=f"stream_options.{name}"
                )


def include_usage(body: CommonBody) -> bool:
    return bool(body.stream_options and body.stream_options.get("include_usage"))


def namespace(body: Mapping[str, Any]) -> str | None:
    try:
        return namespace_of(body)
    except PromptError as error:
        raise ApiError(400, f"Invalid value for {error.param!r}: {error}", param=error.param) from None


def sampling(body: CommonBody, service: Service, max_new_tokens: int) -> SamplingParams:
    return body.params(
        service.defaults,
        service.prompts.vocab_size,
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
    )


def envelope(id: str, object: str, model: str) -> dict[str, Any]:
    """The members that begin an answer and each of its chunks."""
    return {"id": id, "object": object, "created": int(time.time()), "model": model}


def finish_reason(finish: FinishReason | None) -> str | None:
    """`stop`, `length`, or `abort` for a request that an operator ended."""
    return None if finish is None else finish.type


def chat_logprobs(out: TextOut, prompts: Prompts) -> dict[str, Any] | None:
    """OpenAI's chat form. None when none were asked for."""
    if out.output_token_logprobs is None:
        return None
    tops = out.output_top_logprobs or [[] for _ in out.output_token_logprobs]
    content = [
        {**_entry(chosen, prompts), "top_logprobs": [_entry(other, prompts) for other in top]}
        for chosen, top in zip(out.output_token_logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(logprob: TextLogprob, prompts: Prompts) -> dict[str, Any]:
    value, id, text = logprob
    return {"token": text or "", "logprob": floor(value), "bytes": prompts.bytes_of(id, text or "")}


def floor(value: float | None) -> float | None:
    """JSON has no infinity: a token that sampling excluded is as improbable as OpenAI's API can say."""
    return None if value is None else max(value, -9999.0)


class TextLogprobs:
    """OpenAI's completions form, which counts text offsets through the whole answer: one per choice."""

    def __init__(self) -> None:
        self._offset = 0

    def take(
        self, chosen: Sequence[TextLogprob], tops: Sequence[Sequence[TextLogprob] | None] | None
    ) -> dict[str, Any]:
        offsets: list[int] = []
        for _, _, text in chosen:
            offsets.append(self._offset)
            self._offset += len(text or "")
        return {
            "tokens": [text or "" for _, _, text in chosen],
            "token_logprobs": [floor(value) for value, _, _ in chosen],
            "top_logprobs": [_by_text(top) for top in tops] if tops else None,
            "text_offset": offsets,
        }


def _by_text(top: Sequence[TextLogprob] | None) -> dict[str, float | None] | None:
    if top is None:
        return None
    found: dict[str, float | None] = {}
    for value, _, text in top:
        found.setdefault(text or "", floor(value))  # two ids may share a text: the likelier one comes first
    return found
