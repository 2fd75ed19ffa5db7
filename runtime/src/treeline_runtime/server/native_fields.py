"""Typed bodies of SGLang's own endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from treeline_runtime.messages import CustomProcessor
from treeline_runtime.server import grammars, openai, processors, tools
from treeline_runtime.server.sampling import Count, Priority, SamplingFields, Seed, TokenId, TopCount

StartLen = Annotated[int, Meta(ge=-1, le=1 << 31)]


class NativeSampling(SamplingFields, frozen=True):
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None


def read_processor(sampling: NativeSampling, name: str | None, params: dict[str, Any] | None) -> CustomProcessor | None:
    """name, params: what the body says beside them. Raises ApiError 400."""
    return processors.read_processor(
        {"custom_logit_processor": name, "sampling_params.custom_logit_processor": sampling.custom_logit_processor},
        {"custom_params": params, "sampling_params.custom_params": sampling.custom_params},
    )


class GenerateBody(Struct, frozen=True):
    """What of a `/generate` request we act on. Lists make a batch; one value then counts for all its members."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[Any] | None = None
    rid: openai.Rid | list[openai.Rid] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    """Of the whole batch."""
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: TopCount | list[TopCount] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | None = None
    custom_logit_processor: str | list[str | None] | None = None
    custom_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    """As in `sampling_params`: SGLang's clients have the first here, and the second there."""


class TokenizeBody(Struct, frozen=True):
    prompt: str | list[str] | None = None
    messages: Any = None
    chat_template: openai.ChatTemplateText | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeBody(Struct, frozen=True):
    tokens: list[Any]
    """Ids, or lists of ids."""
    skip_special_tokens: bool | None = None
    model: str | None = None


class OneList(Struct, frozen=True):
    tokens: list[TokenId]


class ManyLists(Struct, frozen=True):
    tokens: list[list[TokenId]]


GENERATE_FIELDS = frozenset(GenerateBody.__struct_fields__) | openai.NAMESPACE_FIELDS
SAMPLING_FIELDS = frozenset(NativeSampling.__struct_fields__) | grammars.SAMPLING_FIELDS
TOKENIZE_FIELDS = frozenset(TokenizeBody.__struct_fields__) | openai.TEMPLATE_FIELDS | tools.FIELDS
DETOKENIZE_FIELDS = frozenset(DetokenizeBody.__struct_fields__)
