"""Bodies of `/v1/messages` and `/v1/messages/count_tokens` → a chat's."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from treeline_runtime.server.errors import NO_THREADS, invalid, missing, short, unsupported, wrong
from treeline_runtime.server.fields import HARMLESS, check_unknown
from treeline_runtime.server.openai import TextBody, Variables
from treeline_runtime.server.sampling import PositiveCount, SamplingFields

_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}


class MessagesBody(TextBody, frozen=True, kw_only=True):
    """A chat. If `max_tokens` exceeds the room in the context, the answer may fill it."""

    harmless: ClassVar = {
        **HARMLESS,
        "betas": "supported features need no beta flag",
        "cache_control": "prefixes are always cached",
        "billing_policy": "there is no billing",
        "diagnostics": "the usage says how much was cached",
        **dict.fromkeys(("fallbacks", "fallback_credit_token"), "there are no fallback models"),
        "speed": "there is one speed",
        "inference_geo": "there is one region",
        "user_profile_id": "identifies the user",
        "workspace_id": "identifies the user",
    }
    shown: ClassVar = {
        "max_tokens": {"type": "integer", "minimum": 1, "description": "`count_tokens` needs none."},
        "n": {"enum": [None, 1]},
        "stop": {"description": "Called `stop_sequences` here.", "enum": [None, "", []]},
    }
    messages: Annotated[list[Any], Meta(min_length=1, extra_json_schema={"items": _MESSAGE})]
    chat_template_kwargs: Variables = None
    system: str | list[Any] | None = None
    max_tokens: PositiveCount | None = None
    stop_sequences: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None


NAMES: Final[Mapping[str, str]] = {
    "messages": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
"""A chat's fields with other names here; the chat's messages differ from the request's."""
MEMBERS: Final[Mapping[str, str]] = {".function.parameters": ".input_schema", ".function": "", ".json_schema": ""}
"""Inside tools and formats."""
_AS_THEY_ARE: Final = (
    *(name for name in SamplingFields.__struct_fields__ if name not in ("n", "stop")),
    *("seed", "rid", "priority"),
)
_ROLES: Final[Mapping[str, frozenset[str]]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}
"""The speaker of each role."""
_BLOCKS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset({"type", "text", "cache_control", "citations", "parsed_output"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "image": frozenset({"type", "source", "cache_control"}),
}
"""Members of content blocks. Members that a returned answer has, and cache hints, mean nothing to a model."""
_TOOL: Final = frozenset({"type", "name", "description", "input_schema", "strict"})
_TOOL_HINTS: Final = frozenset({"cache_control", "eager_input_streaming"})
_CHOICES: Final = ("auto", "any", "tool", "none")
_THINKING: Final = ("enabled", "disabled", "adaptive")
_KEPT: Final = {"type": "clear_thinking_20251015", "keep": "all"}
"""Sent by Claude Code: thoughts of earlier turns stay in the prompt, as they always do here."""
_THINKING_HINTS: Final = frozenset({"budget_tokens"})
"""Only a target in Anthropic's words; nothing here enforces it."""


def read_messages(raw: Mapping[str, Any], *, images: bool = False, counts: bool = False) -> MessagesBody:
    """`images`: the model reads some. `counts`: only count tokens. Raises ApiError 400."""
    body = MessagesBody.read(raw)
    if body.max_tokens is None and not counts:
        raise missing("max_tokens")
    if body.n not in (None, 1) or body.stop:
        name = "n" if body.stop is None else "stop"
        raise unsupported(name, "this API has no such field")
    _check_blocks(body.system, "system", _ROLES["system"], frozenset())
    for i, message in enumerate(body.messages or ()):
        _check_message(message, f"messages[{i}]", frozenset({"image"} if images else ()))
    for i, tool in enumerate(body.tools or ()):
        _check_tool(tool, f"tools[{i}]")
    _check_choice(body)
    _check_kept(body)
    if body.thinking is not None:
        check_unknown(body.thinking, {"type", "display"}, harmless=_THINKING_HINTS, where="thinking.")
        if body.thinking.get("type") not in _THINKING:
            raise unsupported("thinking.type", f"expected one of {', '.join(_THINKING)}")
        if body.thinking.get("display") not in (None, "summarized", "omitted"):
            raise unsupported("thinking.display", "expected 'summarized' or 'omitted'")
    return body


def chat_fields(body: MessagesBody, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Members of the chat's body that do not concern its prompt. Raises ApiError 400."""
    made = {name: raw[name] for name in _AS_THEY_ARE if raw.get(name) is not None}
    if body.stop_sequences:
        made["stop"] = body.stop_sequences
    if body.tools and (body.tool_choice or {}).get("disable_parallel_tool_use") is True:
        made["parallel_tool_calls"] = False
    if body.thinking and body.thinking.get("display") == "omitted":
        made["include_reasoning"] = False
    if body.output_config:
        check_unknown(body.output_config, {"effort", "format"}, harmless=(), where="output_config.")
        format = body.output_config.get("format")
        if format is not None:
            made["response_format"] = _response_format(format)
    return made


def _check_message(message: Any, where: str, media: frozenset[str]) -> None:
    """Raises ApiError 400 for unused members. The conversion checks the rest."""
    if not isinstance(message, dict):
        return
    check_unknown(message, {"role", "content"}, harmless=(), where=f"{where}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(_ROLES)}")
    kinds = _ROLES[role] | media if role == "user" else _ROLES[role]
    _check_blocks(message.get("content"), f"{where}.content", kinds, media)


def _check_blocks(content: Any, where: str, kinds: Container[str], media: frozenset[str]) -> None:
    """`kinds`: the allowed ones; `media`: of them, those allowed in results of tools besides text."""
    for i, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        kind, at = block.get("type"), f"{where}[{i}]"
        if not isinstance(kind, str) or kind not in kinds:
            raise unsupported(f"{at}.type", f"blocks of this type are not supported here: {short(kind)!r}")
        check_unknown(block, _BLOCKS[kind], harmless=(), where=f"{at}.")
        if kind == "tool_result":
            _check_type(block, "tool_use_id", str, "a text", at)
            _check_blocks(block.get("content"), f"{at}.content", media | {"text"}, media)
        if kind == "tool_use":
            _check_type(block, "id", str, "a text", at)
            _check_type(block, "name", str, "a text", at)
            _check_type(block, "input", dict, "an object", at)


def _check_type(block: Mapping[str, Any], name: str, type: type, said: str, where: str) -> None:
    if not isinstance(block.get(name), type):
        raise invalid(f"{where}.{name}", f"expected {said}")


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise invalid(where, "expected an object")
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", f"built-in tools are not served here: {short(tool['type'])!r}")
    check_unknown(tool, _TOOL, harmless=_TOOL_HINTS, where=f"{where}.")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema", "expected a JSON Schema, which is an object")


def _check_choice(body: MessagesBody) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    check_unknown(choice, {"type", "name", "disable_parallel_tool_use"}, harmless=(), where="tool_choice.")
    if choice.get("type") not in _CHOICES:
        raise unsupported("tool_choice.type", f"expected one of {', '.join(_CHOICES)}")
    if not isinstance(choice.get("disable_parallel_tool_use"), bool | None):
        raise unsupported("tool_choice.disable_parallel_tool_use", "expected true or false")
    if choice["type"] in ("any", "tool") and not body.tools:
        raise unsupported("tool_choice", "there are no 'tools' to choose from")


def _check_kept(body: MessagesBody) -> None:
    """Refuses what would leave out part of the prompt, or was sent before."""
    if body.thread is not None:
        raise wrong("thread", "'thread': conversations are not stored here", code=NO_THREADS)
    context = body.context_management or {}
    check_unknown(context, {"edits"}, harmless=(), where="context_management.")
    edits = context.get("edits") or []
    if not isinstance(edits, list) or any(edit != _KEPT for edit in edits):
        raise unsupported("context_management.edits", "conversations are never shortened here")


def _response_format(format: Any) -> dict[str, Any]:
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        raise unsupported("output_config.format.type", "expected json_schema")
    check_unknown(format, {"type", "schema"}, harmless=(), where="output_config.format.")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format.get("schema"), "strict": True}}
