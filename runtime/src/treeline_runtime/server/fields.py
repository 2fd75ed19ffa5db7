"""Fields without effect: which are accepted, and which are refused.

*Harmless* fields do not change an answer, or clients always send them; a response header lists them. *Neutral* values
ask for the default (`best_of: 1`, `logprobs: false`). All other unsupported fields are errors that name the field:
ignoring one would answer another question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, Final, Self, TypeVar

import msgspec

from treeline_runtime.server.errors import ApiError, invalid, missing, short, wrong

T = TypeVar("T")

_PAIR = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
"""May contain lone surrogates, and backslashes that begin no escape."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_A_NUMBER = re.compile(rb"[\[:,]\s*-?(?:NaN|Infinity)\b")

MAX_IGNORED: Final = 32
MAX_IGNORED_CHARS: Final = 64
IGNORED: Final = ContextVar[dict[str, None] | None]("ignored", default=None)
"""Members of the current request that are ignored, in order; `Reader.read` adds them to its result."""

MEDIA_SETTINGS: Final = (
    *("images_config", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "mm_payload"),
    *("mm_processor_kwargs", "return_mm_kwargs", "use_audio_in_video", "video_config"),
)
"""Fields without effect on requests that have no images."""
HARMLESS: Mapping[str, str] = {
    "user": "identifies the user",
    "metadata": "the client's own bookkeeping",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "reasoning_effort": "the chat template does not use it",
    "verbosity": "ask for short answers in the prompt",
    "prompt_cache_options": "prefixes are always cached",
    "prompt_cache_key": "prefixes are always cached",
    "prompt_cache_retention": "prefixes are always cached",
    "safety_identifier": "identifies the user",
    "log_metrics": "all requests are counted (sent by SGLang's router)",
    "guided_decoding_backend": "vLLM's choice of a grammar library; the constraint is the same",
    "stream_interval": "chunks have one size (sent by SGLang's benchmarks)",
    "session_id": "a routing hint of SGLang's benchmarks",
    "custom_labels": "labels of SGLang's statistics",
    "length_penalty": "there is no beam search",
    "prediction": "a predicted answer, which would only save time",
    "return_flat_raw_top_logprobs_b64": "a format of log probabilities that were not requested",
    "return_spec_tokens_details": "the usage has accepted and rejected predictions",
    "return_token_offsets": "used only by vLLM's paths that render prompts",
    "routed_experts_prompt_start": "experts are not reported",
    "routed_experts_start_len": "experts are not reported",
    "task": "used only by DeepSeek-V4",
    "truncation_side": "prompts are never truncated",
    **dict.fromkeys(MEDIA_SETTINGS, "it concerns images alone: with some it is refused"),
}
"""Fields without effect on an answer, and why. Any value is accepted."""

MESSAGE_FIELDS = frozenset({"role", "content"})
INERT_MESSAGE_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Reasoning of earlier turns: templates without a place for it drop it on purpose."""
INERT_ANSWER_FIELDS = INERT_MESSAGE_FIELDS | {
    "parsed",
    "provider_specific_fields",
    "reasoning_details",
    "thinking_blocks",
}
"""Fields that client libraries keep with an answer and send back: openai's `parse`, litellm, OpenRouter's clients."""
INERT_RESULT_FIELDS = INERT_MESSAGE_FIELDS | {"tool_call_id", "name"}
"""The call that a `role: tool` message answers: templates without a place for it use the order."""
PART_FIELDS = frozenset({"type", "text"})
INERT_PART_FIELDS = frozenset({"cache_control"})

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "template": ("",),
    "lora_path": ("",),
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True,),
    "stream_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "beam_width": (1,),
    "truncate_prompt_tokens": (-1,),
    "detokenize": (True,),
    "thinking_token_budget": (-1,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (0,),
    "allowed_callers": (["direct"],),
}
"""Values besides null, false, [] and {} that ask for nothing."""

ON_BY_DEFAULT = frozenset({"normalize", "use_activation", "activation", "softmax"})
"""Fields whose default in clients is true (vLLM's, current and older): if unsupported, false is not neutral."""


class Body(msgspec.Struct, frozen=True):
    """The supported fields of a request or of an object within one, shown by the OpenAPI document (`schema`). A field
    checked elsewhere is typed `Any`, with its schema."""

    harmless: ClassVar[Mapping[str, str]] = HARMLESS
    """Ignored fields, and why."""
    shown: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """Schemas of fields whose types say too little."""
    parts: ClassVar[tuple[type[Body], ...]] = ()
    """Objects inside it that no field's type names."""

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str = "") -> Self:
        """Raises ApiError 400, also for unknown fields that are not harmless. `where`: prefix of their names."""
        check_unknown(raw, cls.__struct_fields__, harmless=cls.harmless, where=where)
        given = {name: value for name, value in raw.items() if value is not None}  # null means "not given"
        return convert(given, cls, where)


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Raises ApiError 400."""
    try:
        value = msgspec.json.decode(body or b"{}")
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ApiError(400, f"The body is not valid JSON: {why_not_json(body, error)}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object")
    return value


def why_not_json(text: bytes | bytearray, error: Exception) -> str:
    """Says why a text is not JSON, with words of our own for two common mistakes that `error` does not name."""
    if _SURROGATE.search(_PAIR.sub(b"", text)):
        return "it contains half of a surrogate pair (as \\ud800), which is not text"
    if _NOT_A_NUMBER.search(text):
        return "NaN and Infinity are not JSON numbers; leave such a member out"
    return str(error)


def ignore(name: str) -> None:
    """Adds this to the header of ignored fields, as far as its limit allows."""
    noted = IGNORED.get()
    if noted is not None and len(noted) < MAX_IGNORED:
        noted[re.sub(r"[^\w.$/\[\]-]", "?", name[:MAX_IGNORED_CHARS], flags=re.ASCII)] = None


def check_unknown(
    body: Mapping[str, Any], known: Container[str], *, harmless: Container[str] = HARMLESS, where: str = ""
) -> None:
    """Raises ApiError 400 for the first field that is neither known nor harmless. `where`: prefix of its name. Harmless
    ones are reported as ignored, except members of lists."""
    for name, value in body.items():
        if name in known or is_neutral(name, value):
            continue
        if name in harmless:
            if "[" not in where:
                ignore(where + name)
            continue
        param = where + short(name)
        why = REASONS.get(name)
        raise wrong(
            param,
            f"{param!r} is not supported by this server{_shown(value)}{'' if why is None else f': {why}'}",
            code="unsupported_parameter",
        )


def check_messages(messages: Any, template_reads: Callable[[str], bool]) -> None:
    """Raises ApiError 400 for a field of a message that the chat template would ignore, or missing content.

    Rendering checks types.
    """
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where = f"messages[{i}]."
        unread = {name: value for name, value in message.items() if not template_reads(name)}
        check_unknown(unread, MESSAGE_FIELDS, harmless=_inert(message.get("role")), where=where)
        _check_calls(message.get("tool_calls"), f"{where}tool_calls")
        content = message.get("content")
        if content is None and message.get("role") not in (None, "assistant"):
            param = where + "content"
            raise missing(param)
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                _check_part(part, f"{where}content[{j}].")


def _check_part(part: Mapping[str, Any], where: str) -> None:
    name = next((name for name in ("image_url", "video_url") if name in part and part.get("type", name) == name), None)
    if name is not None:
        known = part
        if "uuid" in part:  # vLLM's name of an image, whose bytes name it here
            ignore(f"{where}uuid")
            known = {name: value for name, value in part.items() if name != "uuid"}
        check_unknown(known, {"type", name, "detail"}, harmless=INERT_PART_FIELDS, where=where)
        if isinstance(part[name], dict):
            check_unknown(part[name], {"url", "detail"}, harmless=(), where=f"{where}{name}.")
    elif part.get("type", "text") == "text":
        check_unknown(part, PART_FIELDS, harmless=INERT_PART_FIELDS, where=where)


def _inert(role: Any) -> Container[str]:
    match role:
        case "assistant":
            return INERT_ANSWER_FIELDS
        case "tool":
            return INERT_RESULT_FIELDS
    return INERT_MESSAGE_FIELDS


def _check_calls(calls: Any, where: str) -> None:
    """Raises ApiError 400 for calls of earlier turns that no template can write; rendering parses arguments."""
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        if not isinstance(call, dict):
            continue
        param = f"{where}[{i}]"
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise invalid(param, "expected the call of a function", code=None)
        for member, types, said in (
            ("name", str, "a text"),
            ("arguments", str | dict | None, "the text of a JSON object"),
        ):
            if not isinstance(function.get(member), types):
                raise invalid(f"{param}.function.{member}", f"expected {said}", code=None)


def is_neutral(name: str, value: Any) -> bool:
    if value is None or (value is False and name not in ON_BY_DEFAULT) or value == [] or value == {}:
        return True
    # 1 == True in Python: compare types too
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ()))


def _shown(value: Any) -> str:
    if isinstance(value, str) and len(value) > 40:
        return ""
    return f" (got {value!r})" if isinstance(value, str | int | float) and len(repr(value)) <= 40 else ""


def convert(body: Mapping[str, Any], type: type[T], where: str = "") -> T:
    """A decoded JSON object → a typed struct. Raises ApiError 400 naming the field. `where`: prefix of its name.

    JSON has one kind of number: 1.0 counts as a whole number.
    """
    try:
        return msgspec.convert(body, type)
    except msgspec.ValidationError as error:
        if "`float`" not in str(error):
            raise as_api_error(error, where) from None
    try:
        return msgspec.convert({name: _whole(value) for name, value in body.items()}, type)
    except msgspec.ValidationError as error:
        raise as_api_error(error, where) from None


def _whole(value: Any) -> Any:
    """Floats without a fraction → integers, in a field and its lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):  # of integers, or of lists of them
        return [_whole(item) for item in value]
    return value


def as_api_error(error: msgspec.ValidationError, where: str = "") -> ApiError:
    text, _, path = str(error).partition(" - at `")
    path = short(path)
    param = where + path.rstrip("`").removeprefix("$").removeprefix(".").removesuffix("[...]")
    if lacks := re.fullmatch(r"Object missing required field `(\w+)`", text):
        param = f"{param}.{lacks[1]}" if param else lacks[1]
        return missing(param)
    plain = text.replace("`", "").replace(" | null", "").replace(" | ", " or ")
    return wrong(param or None, f"Invalid value for {param!r}: {plain}", code="invalid_value")


_STORE: Final = "nothing is stored: send the whole conversation each time"
_DISAGGREGATION: Final = "prefill and decode run on the same server"
_OF_LOGPROBS: Final = "use 'logprobs' and 'top_logprobs'"
_WATERMARK: Final = "outputs have no watermarks"
_EXPERTS: Final = "chosen experts are not reported"
_ADAPTER: Final = "there are no LoRA adapters"
_CUT: Final = "prompts are never truncated: send a shorter one"
_OLD_CALLS: Final = "OpenAI's older form: use 'tools' and 'tool_choice'"
_TOKENS: Final = "use 'return_token_ids'"

REASONS: Final[Mapping[str, str]] = {
    "add_special_tokens": "the chat template writes all special tokens of a chat",
    "audio": "answers are text",
    "background": _STORE,
    "best_of": "use 'n', and choose",
    "bootstrap_host": _DISAGGREGATION,
    "bootstrap_port": _DISAGGREGATION,
    "bootstrap_room": _DISAGGREGATION,
    "context_management": "conversations are never shortened here",
    "context": _STORE,
    "conversation": _STORE,
    "disagg_prefill_dp_rank": _DISAGGREGATION,
    "ec_transfer_params": _DISAGGREGATION,
    "enable_response_messages": _TOKENS,
    "function_call": _OLD_CALLS,
    "functions": _OLD_CALLS,
    "guided_whitespace_pattern": "JSON is written as json.dumps does",
    "input_ids": "a chat has messages; /generate and /v1/completions take token ids",
    "kv_transfer_params": _DISAGGREGATION,
    "logprob_token_ids": _OF_LOGPROBS,
    "lora_path": _ADAPTER,
    "modalities": "answers are text",
    "personality": "set the style in 'instructions'",
    "previous_input_messages": "send them as 'input'",
    "previous_response": "send its output as 'input'",
    "prompt": "nothing is stored: send the text itself",
    "prompt_embeds": "prompts are texts or token ids",
    "reasoning": "use 'reasoning_effort'",
    "repetition_detection": "use 'frequency_penalty', or 'max_tokens'",
    "return_cached_tokens_details": "see the usage",
    "return_flat_raw_output_top_logprobs": _OF_LOGPROBS,
    "return_hidden_states": "use /generate on a server started with --enable-return-hidden-states",
    "return_input_ids_in_sglext": _TOKENS,
    "return_meta_info": _TOKENS,
    "return_output_ids_in_sglext": _TOKENS,
    "return_prompt_text": _TOKENS,
    "return_prompt_token_ids": _TOKENS,
    "return_routed_experts": _EXPERTS,
    "return_sampling_mask": _OF_LOGPROBS,
    "return_tokens_as_token_ids": _TOKENS,
    "sampling_logprobs_mode": _OF_LOGPROBS,
    "session_params": "there are no sessions: prefixes are found without",
    "suffix": "infilling is not supported: write the model's own markers into the prompt",
    "template": "the checkpoint's chat template is used; with 'raw' the prompt is the whole text",
    "thinking": "use 'reasoning_effort', or 'chat_template_kwargs' with what the template reads",
    "thinking_token_budget": "use 'reasoning_effort'",
    "truncate_prompt_tokens": _CUT,
    "use_beam_search": "use 'n'",
    "vllm_xargs": "logit processors are for chats, completions and /generate",
    "watermark": _WATERMARK,
    "watermarking": _WATERMARK,
    "web_search_options": "built-in tools are not served here",
}
"""Reasons by name, for any path."""
