"""Code that chat completions and completions share: typed bodies, and pieces of their answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from treeline_wire.prompt import Prompt, PromptError, namespace_of, prompt_of_completion

from treeline_runtime.media.sources import MediaRules
from treeline_runtime.messages import (
    CustomProcessor,
    FinishReason,
    GenerateReq,
    SamplingParams,
    TextLogprob,
    TextOut,
    decode_logprobs,
)
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.server import grammars, tools
from treeline_runtime.server.answers import ContentLogprob, PromptLogprob, TokenLogprob
from treeline_runtime.server.errors import UnknownModel, invalid, wrong
from treeline_runtime.server.fields import Body, ignore
from treeline_runtime.server.formats import NO_FORMATS, Formats
from treeline_runtime.server.grammars import Constraint
from treeline_runtime.server.jobs import Caller
from treeline_runtime.server.pacing import Pacer, elements
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.sampling import (
    MAX_TOP_LOGPROBS,
    Count,
    PositiveCount,
    Priority,
    ProcessorName,
    SamplingDefaults,
    SamplingFields,
    Seed,
    TopCount,
    read_processor,
)


@dataclass(frozen=True)
class ModelFacts:
    """The facts about the model that readers of bodies need."""

    name: str
    prompts: Prompts
    defaults: SamplingDefaults
    pooling: Pooling | None = None
    """How the model makes vectors; None if it makes text."""
    formats: Formats = NO_FORMATS
    """Formats of reasoning and tool calls."""
    media: MediaRules | None = None
    """Of images in requests; None: it reads text alone."""

    def check_model(self, name: object) -> None:
        """Raises UnknownModel for another model than the served one; no name means this one."""
        if name is not None and name != self.name:
            raise UnknownModel(name, self.name)


Rid = Annotated[str, Meta(min_length=1, max_length=128)]


ChatTemplateText = Annotated[str, Meta(max_length=32 << 10)]
"""Known ones have up to 20 thousand characters."""
MAX_SALT_CHARS = 1024
"""Bounded because a salt is stored with every page and sent to every router."""
Salt = Annotated[
    Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None,
    Meta(description="Requests with different values share no cached prefix."),
]
"""Read by wire's `namespace_of`."""
_CONVERSATION: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
            "tool_calls": {
                "type": ["array", "null"],
                "description": "Of the assistant; arguments are the text of JSON.",
            },
            "tool_call_id": {"type": ["string", "null"], "description": "Which call a message of `tool` answers."},
        },
    },
}
_FOR_TEMPLATE = "Rendered by the chat template. Parts of a content have the type `text`."
Conversation = Annotated[Any, Meta(description=_FOR_TEMPLATE, extra_json_schema=_CONVERSATION)]
MaybeConversation = Annotated[
    Any, Meta(description=_FOR_TEMPLATE, extra_json_schema={"anyOf": [_CONVERSATION, {"type": "null"}]})
]
_PASSED = "Passed to the chat template."
Documents = Annotated[Any, Meta(description=_PASSED, extra_json_schema={"type": ["array", "null"]})]
TemplateFlag = Annotated[Any, Meta(description=_PASSED, extra_json_schema={"type": ["boolean", "null"]})]
Variables = Annotated[Any, Meta(description=_PASSED, extra_json_schema={"type": ["object", "null"]})]
"""All four are read, and checked, by wire's `prompt_of_chat`."""
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXTS: dict[str, list[Any]] = {
    "anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}}]
}
_PROMPTS = "A text or its token ids, or several of them."
Texts = Annotated[Any, Meta(description=_PROMPTS, extra_json_schema=TEXTS)]
MaybeTexts = Annotated[
    Any, Meta(description=_PROMPTS, extra_json_schema={"anyOf": [*TEXTS["anyOf"], {"type": "null"}]})
]
"""Both are read, and checked, by wire's `prompt_of_completion`."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's, and the highest of SGLang and vLLM."""


class StreamOptions(Body, frozen=True):
    """Optional parts of a stream's chunks."""

    harmless: ClassVar = {"include_obfuscation": "padding that hides token lengths in encrypted packets"}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk: vLLM's, sent by guidellm and aiperf."""


class TextBody(SamplingFields, frozen=True, kw_only=True):
    """What all APIs of texts call alike."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: Salt = None
    extra_key: Salt = None
    seed: Seed | None = None
    rid: Rid | None = None
    priority: Priority | None = None


class CommonBody(TextBody, frozen=True, kw_only=True):
    stream_options: StreamOptions | None = None
    response_format: grammars.ResponseFormat = None
    structured_outputs: grammars.StructuredOutputs = None
    json_schema: grammars.JsonSchema = None
    regex: grammars.Regex = None
    ebnf: grammars.Ebnf = None
    structural_tag: grammars.StructuralTag = None
    choice: grammars.Choices = None
    guided_json: grammars.JsonSchema = None
    guided_regex: grammars.Regex = None
    guided_choice: grammars.Choices = None
    guided_grammar: grammars.Ebnf = None
    min_tokens: Count | None = None
    request_id: Rid | None = None
    """vLLM's name of `rid`."""
    custom_logit_processor: ProcessorName | None = None
    custom_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    """vLLM's name of `custom_params`."""
    return_token_ids: bool | None = None
    """vLLM's, as the next."""
    prompt_logprobs: TopCount | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """A chat. Unset sampling values come from the checkpoint; `max_tokens` is the rest of the context."""

    messages: Conversation
    documents: Documents = None
    add_generation_prompt: TemplateFlag = None
    continue_final_message: TemplateFlag = None
    chat_template_kwargs: Variables = None
    tools: tools.Tools = None
    tool_choice: tools.ToolChoice = None
    parallel_tool_calls: tools.SeveralCalls = None
    reasoning_effort: Annotated[
        Effort | None,
        Meta(description="Passed to the chat template, and turns its thinking on or off."),
    ] = None
    chat_template: ChatTemplateText | None = None
    """Instead of the model's: vLLM's."""
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    include_reasoning: bool | None = None
    """Whether to show reasoning: vLLM's."""
    separate_reasoning: bool | None = None
    """Whether to separate reasoning from the answer: SGLang's."""
    stream_reasoning: bool | None = None
    """Whether to stream reasoning: SGLang's."""
    echo: bool | None = None
    """The continued message comes first: vLLM's."""


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """Prompts to continue. Unset sampling values come from the checkpoint; `max_tokens` is 16."""

    shown: ClassVar = {
        "logprobs": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}, {"enum": [None, False]}]}
    }
    prompt: Texts
    max_tokens: Count | None = None
    logprobs: TopCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
"""Of chat templates: an effort sets all of them (`treeline_wire.dialects.treeline`)."""


def read_chat(body: Mapping[str, Any], model: ModelFacts) -> ChatBody:
    """Raises ApiError 400 or 404."""
    typed = ChatBody.read(body)
    model.prompts.check_place(typed.chat_template)
    if typed.reasoning_effort and model.prompts.variables(typed.chat_template).isdisjoint(EFFORT_VARIABLES):
        ignore("reasoning_effort")
    _check_common(body, typed, model)
    both = typed.max_tokens is not None and typed.max_completion_tokens is not None
    if both and typed.max_tokens != typed.max_completion_tokens:
        raise wrong("max_tokens", "'max_tokens' and 'max_completion_tokens' contradict each other")
    if typed.top_logprobs and not typed.logprobs:
        raise wrong("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    return typed


def read_completion(body: Mapping[str, Any], model: ModelFacts) -> CompletionBody:
    """Raises ApiError 400 or 404."""
    if body.get("logprobs") is False:  # chat's spelling of "none"
        body = {**body, "logprobs": None}
    typed = CompletionBody.read(body)
    _check_common(body, typed, model)
    return typed


def _check_common(raw: Mapping[str, Any], body: CommonBody, model: ModelFacts) -> None:
    model.check_model(body.model)
    if body.stream_options is not None:
        if not body.stream:
            raise wrong("stream_options", "'stream_options' is only allowed with 'stream': true")
        StreamOptions.read(raw["stream_options"], "stream_options.")


def rid_of(body: CommonBody, kind: str) -> str:
    """The request's id in either spelling, or a new one. Raises ApiError 400."""
    if None not in (body.rid, body.request_id) and body.rid != body.request_id:
        raise wrong("request_id", "'rid' and 'request_id' contradict each other", code="invalid_value")
    return body.rid or body.request_id or new_rid(kind)


def new_rid(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def encodable(text: str) -> str:
    """The text. Raises ApiError 400 for lone surrogates, which UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong("prompt", "'prompt' contains half of a surrogate pair") from None
    return text


def prompts_in(body: Mapping[str, Any], param: str = "prompt") -> list[Prompt]:
    """The texts or ids of `prompt`, which the request calls `param`. Raises ApiError 400."""
    try:
        return prompt_of_completion(body)
    except PromptError as error:
        raise invalid(param, str(error), code=None) from None


def namespace(body: Mapping[str, Any], caller: Caller) -> str | None:
    """The request's cache namespace. Raises ApiError 400."""
    try:
        return namespace_of({**body, "lora_path": caller.adapter}, caller.tenant)
    except PromptError as error:
        raise invalid(error.param, str(error), code=None) from None


def sampling(
    body: CommonBody,
    model: ModelFacts,
    max_new_tokens: int,
    constraint: Constraint | None = None,
    processor: CustomProcessor | None = None,
) -> SamplingParams:
    return body.params(
        model.defaults,
        model.prompts,
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
        constraint=constraint,
        processor=processor,
    )


def processor(body: CommonBody) -> CustomProcessor | None:
    """The request's logit processor. Raises ApiError 400."""
    given = {"custom_params": body.custom_params, "vllm_xargs": body.vllm_xargs}
    return read_processor({"custom_logit_processor": body.custom_logit_processor}, given)


def task_fields(body: CommonBody, caller: Caller, kind: str, logprobs: int | None) -> dict[str, Any]:
    """The fields of a `TextTask` without prompts. `kind` begins a new id. Raises ApiError 400."""
    if body.stream and body.prompt_logprobs is not None:
        raise wrong("prompt_logprobs", "'prompt_logprobs' come with whole answers, not with streams")
    options = body.stream_options or StreamOptions()
    return {
        "rid": rid_of(body, kind),
        "n": body.n or 1,
        "hides_cache": caller.shares_cache,
        "stream": bool(body.stream),
        "usage": bool(options.include_usage),
        "continuous_usage": bool(options.continuous_usage_stats),
        "logprobs": logprobs,
        "prompt_logprobs": body.prompt_logprobs,
        "token_ids": bool(body.return_token_ids),
    }


def request(
    body: CommonBody,
    ids: list[int],
    sampling: SamplingParams,
    namespace: str | None,
    logprobs: int | None,
    *,
    echo: bool = False,
) -> GenerateReq:
    """With the log probabilities to send; they also keep sent ids from being replaced."""
    tops = [top for top in (logprobs, body.prompt_logprobs) if top is not None]
    start = 0 if (echo and logprobs is not None) or body.prompt_logprobs is not None else -1
    return GenerateReq(
        "",
        ids,
        sampling,
        namespace,
        return_logprob=bool(tops) or bool(body.return_token_ids and sampling.grammar is not None),
        logprob_start_len=start,
        top_logprobs_num=max(tops, default=0),
        priority=body.priority or 0,
    )


def envelope(id: str, object: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": object, "created": int(time.time()), "model": model}


def finish_reason(finish: FinishReason | None) -> Literal["stop", "length", "abort"] | None:
    """`abort`: an operator ended the request; other errors are no answers (`Service.check_finish`)."""
    return None if finish is None or finish.type == "error" else finish.type


NO_LOGPROBS = [b"null"]


async def prompt_logprobs(out: TextOut, top: int, pacer: Pacer) -> list[bytes]:
    """vLLM's form as pieces of JSON: an object by token id for each prompt token but the first. The rank is null for a
    token outside the `top` most likely."""
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


def _ranked(one: TextLogprob, tops: Sequence[TextLogprob]) -> dict[str, PromptLogprob]:
    ranks: dict[int, int | None] = {id: rank for rank, (_, id, _) in enumerate(tops, 1)}
    return {str(id): PromptLogprob(floor(value), ranks.get(id), text) for value, id, text in (one, *tops)}


async def chat_logprobs(out: TextOut, top: int | None, prompts: Prompts, pacer: Pacer) -> list[bytes]:
    """OpenAI's chat form as pieces of JSON: `null` if not requested."""
    if not out.logprobs or top is None:
        return NO_LOGPROBS
    parts = list[bytes]()
    for raw in out.logprobs:
        known = decode_logprobs(raw)
        chosen = known.output_tokens or []
        tops = known.output_tops or [[] for _ in chosen]
        content = [
            ContentLogprob(*_entry(one, prompts), [TokenLogprob(*_entry(other, prompts)) for other in likeliest[:top]])
            for one, likeliest in zip(chosen, tops, strict=True)
        ]
        if content:
            parts += [b",", elements(content)]
        await pacer.rest()
    return [b'{"refusal":null,"content":[', *parts[1:], b"]}"]


def _entry(logprob: TextLogprob, prompts: Prompts) -> tuple[str, float, list[int]]:
    """The first members of `TokenLogprob`."""
    value, id, text = logprob
    return text or "", LEAST_LOGPROB if value is None else max(value, LEAST_LOGPROB), prompts.bytes_of(id, text or "")


LEAST_LOGPROB = -9999.0
"""JSON has no infinity: an excluded token gets the lowest value of OpenAI's API."""


def floor(value: float | None) -> float | None:
    return None if value is None else max(value, LEAST_LOGPROB)


class TextLogprobs:
    """OpenAI's completions form, with text offsets through the whole answer: one per choice."""

    def __init__(self, prompts: Prompts, top: int | None, *, skip_special_tokens: bool, echo: bool) -> None:
        """`top`: how many of the most likely are shown; None: none. `skip_special_tokens`: of the output; an echoed
        prompt shows them."""
        self._prompts = prompts
        self._top = top
        self._echo = echo
        self._skip = skip_special_tokens
        self._offset = 0
        self._begun = False

    async def take(self, out: TextOut, pacer: Pacer) -> list[bytes]:
        """Pieces of JSON: `null` if not requested."""
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
        """Returns the character at which this token begins in the text."""
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
