"""Bodies of SGLang's own endpoints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from treeline_runtime.messages import CustomProcessor
from treeline_runtime.server import grammars, openai, tools
from treeline_runtime.server import sampling as shared
from treeline_runtime.server.errors import wrong
from treeline_runtime.server.fields import HARMLESS, Body, check_unknown, convert
from treeline_runtime.server.sampling import Count, Priority, SamplingFields, Seed, TokenId, TopCount

StartLen = Annotated[int, Meta(ge=-1, le=1 << 31)]


class NativeSampling(SamplingFields, frozen=True):
    """Unset values come from the checkpoint, `max_new_tokens` is 128."""

    json_schema: grammars.JsonSchema = None
    regex: grammars.Regex = None
    ebnf: grammars.Ebnf = None
    structural_tag: grammars.StructuralTag = None
    choice: grammars.Choices = None
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    custom_logit_processor: shared.ProcessorName | None = None
    custom_params: dict[str, Any] | None = None


def read_sampling(params: Any) -> tuple[NativeSampling, grammars.Constraint | None]:
    """The parameters of a prompt, and their constraint. Raises ApiError 400."""
    if not isinstance(params, dict):
        raise wrong("sampling_params", "'sampling_params' must be an object")
    check_unknown(params, NativeSampling.__struct_fields__, where="sampling_params.")
    typed = convert(params, NativeSampling, "sampling_params.")
    return typed, grammars.read_constraint(params, grammars.SAMPLING_FIELDS, "sampling_params.")


def of_each(value: Any, count: int, param: str) -> list[Any]:
    """The value for each of `count` prompts. Raises ApiError 400."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise wrong(param, f"{len(value)} values of {param!r} for {count} prompts")
    return value


def read_processor(sampling: NativeSampling, name: str | None, params: dict[str, Any] | None) -> CustomProcessor | None:
    """name, params: from the body besides them. Raises ApiError 400."""
    return shared.read_processor(
        {"custom_logit_processor": name, "sampling_params.custom_logit_processor": sampling.custom_logit_processor},
        {"custom_params": params, "sampling_params.custom_params": sampling.custom_params},
    )


_SAMPLING = {"anyOf": [{"$ref": "#/components/schemas/NativeSampling"}, {"type": "null"}]}


class GenerateBody(Body, frozen=True):
    """Either `text` or `input_ids`, of one or more prompts: lists make a batch, and a single value applies to all."""

    harmless: ClassVar = {
        **HARMLESS,
        "stream_options": "the usage is always there",
    }
    shown: ClassVar = {
        "sampling_params": {"anyOf": [*_SAMPLING["anyOf"], {"type": "array", "items": _SAMPLING}]},
    }
    parts: ClassVar = (NativeSampling,)
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    image_data: str | list[Any] | None = None
    """URLs or base64: of one prompt, or a list with those of each. The text has the model's placeholder for each."""
    video_data: str | list[Any] | None = None
    """The same of videos."""
    sampling_params: dict[str, Any] | list[Any] | None = None
    cache_salt: openai.Salt = None
    extra_key: openai.Salt = None
    rid: openai.Rid | list[openai.Rid] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: TopCount | list[TopCount] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | None = None
    custom_logit_processor: str | list[str | None] | None = None
    custom_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    """May also stand in `sampling_params`: SGLang's clients send `custom_logit_processor` here and this there."""


class TokenizeBody(Body, frozen=True):
    """Either `prompt` or `messages`."""

    prompt: str | list[str] | None = None
    messages: openai.MaybeConversation = None
    documents: openai.Documents = None
    add_generation_prompt: openai.TemplateFlag = None
    continue_final_message: openai.TemplateFlag = None
    chat_template_kwargs: openai.Variables = None
    tools: tools.Tools = None
    tool_choice: tools.ToolChoice = None
    parallel_tool_calls: tools.SeveralCalls = None
    chat_template: openai.ChatTemplateText | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeBody(Body, frozen=True):
    """Token ids: a list, or several."""

    tokens: Annotated[list[Any], Meta(extra_json_schema=openai.TEXTS)]
    skip_special_tokens: bool | None = None
    model: str | None = None


class OneList(Struct, frozen=True):
    tokens: list[TokenId]


class ManyLists(Struct, frozen=True):
    tokens: list[list[TokenId]]
