"""The body of `/v1/responses` → a chat's, and the fields that the answer repeats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta

from treeline_runtime.server.errors import ApiError, invalid, short, unsupported, wrong
from treeline_runtime.server.fields import HARMLESS, check_unknown
from treeline_runtime.server.grammars import StructuredOutputs
from treeline_runtime.server.openai import Rid, StreamOptions, TextBody, Variables
from treeline_runtime.server.sampling import Count, PositiveCount, SamplingFields, TopCount
from treeline_runtime.server.tools import ToolChoice

Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
"""OpenAI's bounds."""


class ResponsesBody(TextBody, frozen=True, kw_only=True):
    """A chat as items. Nothing is stored: each request has the whole conversation. Unset sampling values come from the
    checkpoint; `max_output_tokens` is the rest of the context."""

    harmless: ClassVar = {
        **HARMLESS,
        "client_metadata": "the client's own bookkeeping",
        "max_tool_calls": "there are no built-in tools",
    }
    shown: ClassVar = {
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "n": {"enum": [None, 1]},
        "previous_response_id": {"description": "Nothing is stored.", "type": "null"},
    }
    input: str | list[Any]
    chat_template_kwargs: Variables = None
    structured_outputs: StructuredOutputs = None
    instructions: str | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: PositiveCount | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[Any] | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """With "auto" a long conversation would lose its beginning; it is refused anyway."""
    top_logprobs: TopCount | None = None
    """Number of log probabilities, which must be requested by `include`."""
    include_reasoning: bool | None = None
    previous_response_id: str | None = None
    min_tokens: Count | None = None
    request_id: Rid | None = None
    """The name of `rid` in vLLM and SGLang."""


NAMES: Final[Mapping[str, str]] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""A chat's fields with other names here."""
MEMBERS: Final[Mapping[str, str]] = {".function": "", ".json_schema": ""}
"""Inside tools and formats."""
_AS_THEY_ARE: Final = (
    *(name for name in SamplingFields.__struct_fields__ if name != "n"),
    *("seed", "min_tokens", "rid", "request_id", "priority", "parallel_tool_calls"),
    *("include_reasoning", "structured_outputs"),
)
_INCLUDABLE: Final[Mapping[str, str]] = {
    "reasoning.encrypted_content": "the reasoning is always included",
    **dict.fromkeys(
        (
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "web_search_call.action.sources",
            "web_search_call.results",
        ),
        "of built-in tools; there are none",
    ),
    "message.input_image.image_url": "inputs are not repeated",
}
"""Values of `include` without effect, since their parts are always in the answer, and why."""
_ROLES: Final = ("user", "assistant", "system", "developer")
_ITEMS: Final[Mapping[str, frozenset[str]]] = {
    "message": frozenset({"type", "role", "content", "id", "status", "phase"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status", "parsed_arguments"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
}
"""Members of input items; members that a returned answer has mean nothing to a model."""
_PART: Final = frozenset({"type", "text", "annotations", "logprobs", "parsed"})
_IMAGE: Final = frozenset({"type", "image_url", "detail"})
_TOOL: Final = frozenset({"type", "name", "description", "parameters", "strict"})


def read_responses(raw: Mapping[str, Any], *, images: bool = False) -> ResponsesBody:
    """`images`: the model reads some. Raises ApiError 400."""
    body = ResponsesBody.read(raw)
    if body.n not in (None, 1):
        raise wrong("n", "'n' must be 1: a response is one answer", code="unsupported_parameter")
    if body.stream_options:
        check_unknown(body.stream_options, (), harmless=StreamOptions.harmless, where="stream_options.")
    for one in body.include or ():
        if not isinstance(one, str) or one not in _INCLUDABLE:
            raise unsupported("include", f"{short(one)!r} is not available here")
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        _check_item(item, f"input[{i}]", images)
    for i, tool in enumerate(body.tools or ()):
        _check_tool(tool, f"tools[{i}]")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise unsupported("tool_choice", "there are no 'tools' to choose from")
    return body


def chat_fields(body: ResponsesBody, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Members of the chat's body that do not concern its prompt. Raises ApiError 400."""
    made = {name: raw[name] for name in _AS_THEY_ARE if raw.get(name) is not None}
    if not body.tools:
        made.pop("parallel_tool_calls", None)
    if body.max_output_tokens is not None:
        made["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning:
        known = {name: value for name, value in body.reasoning.items() if (name, value) not in _USUAL}
        check_unknown(known, {"effort"}, harmless={"summary", "generate_summary"}, where="reasoning.")
    if body.text:
        check_unknown(body.text, {"format"}, harmless={"verbosity"}, where="text.")
        format = _response_format(body.text.get("format"))
        made |= {} if format is None else {"response_format": format}
    return made


@contextlib.contextmanager
def uncut(body: ResponsesBody) -> Iterator[None]:
    """Says that a conversation that is too long is not truncated."""
    try:
        yield
    except ApiError as error:
        if body.truncation != "auto" or error.told["code"] != "context_length_exceeded":
            raise
        why = "'truncation': 'auto' is taken where nothing is to be cut: items are never left out."
        told = error.told | {"message": f"{error.told['message']} {why}", "param": "truncation"}
        raise ApiError(error.status, **told) from None


def shown(body: ResponsesBody, temperature: float, top_p: float) -> dict[str, Any]:
    """The fields of the request that the answer repeats; `temperature` and `top_p` are the effective ones."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "temperature": temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": body.truncation or "disabled",
    }


_USUAL: Final = (("context", "auto"), ("mode", "standard"))
"""Values of `reasoning` that have no effect."""


def _check_item(item: Any, where: str, images: bool) -> None:
    """Raises ApiError 400 for unused members. The conversion checks the rest."""
    if not isinstance(item, dict):
        return
    kind = item.get("type", "message")
    known = _ITEMS.get(kind) if isinstance(kind, str) else None
    if kind == "item_reference":
        raise unsupported(f"{where}.type", "nothing is stored: send the item itself")
    if known is None:
        raise unsupported(f"{where}.type", f"items of this type are not supported: {short(kind)!r}")
    check_unknown(item, known, harmless=(), where=f"{where}.")
    if kind == "message" and item.get("role") not in _ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(_ROLES)}", code=None)
    if kind.startswith("function_call") and not isinstance(item.get("call_id"), str):
        raise invalid(f"{where}.call_id", "expected a text", code=None)
    for name in ("content", "output", "summary"):
        parts = item.get(name)
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            if not isinstance(part, dict):
                continue
            if part.get("type") in ("input_text", "output_text"):
                check_unknown(part, _PART, harmless=(), where=f"{where}.{name}[{j}].")
            if part.get("type") == "input_image":
                if not images:
                    raise unsupported(f"{where}.{name}[{j}]", "this model reads texts only")
                check_unknown(part, _IMAGE, harmless=(), where=f"{where}.{name}[{j}].")


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise invalid(where, "expected an object", code=None)
    if tool.get("type") != "function":
        said = f"built-in tools are not served here: {short(tool.get('type'))!r}, expected 'function'"
        raise unsupported(f"{where}.type", said)
    check_unknown(tool, _TOOL, harmless=(), where=f"{where}.")


def _response_format(format: Any) -> dict[str, Any] | None:
    """`text.format` as a chat's `response_format`; None for plain text."""
    kind = "text" if format is None else format.get("type") if isinstance(format, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}
    raise invalid("text.format.type", "expected text, json_schema or json_object", code=None)
