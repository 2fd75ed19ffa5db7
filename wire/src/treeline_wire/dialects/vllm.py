"""vLLM's dialect, as of 0.32.

Sources: vllm/renderers/chat_utils.py (`_parse_chat_message_content`, `_postprocess_messages`), vllm/renderers/hf.py
(`safe_apply_chat_template`, `_convert_developer_to_system`, `_consolidate_system_messages`) and
vllm/entrypoints/openai/chat_completion/protocol.py (`ChatCompletionRequest.build_chat_params`). Pydantic's typed dicts
put members into the order of the type, which shows in templates that print tools as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..errors import PromptError
from .base import ChatDialect, Message, calls_of, check_size, flag, objects, text_of, with_system_for_developer

_KINDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA: Final = frozenset({"image_url", "image_embeds", "image_pil", "audio_url", "input_audio", "video_url"})
_BILLING: Final = "x-anthropic-billing-header"
"""A first line that some client writes into its system prompt, different each time; vLLM removes it."""


class VllmDialect(ChatDialect):
    """See the module. `validated`: messages pass through pydantic's types (those from `/v1/responses` do not)."""

    separator = "\n"

    def __init__(self, *, validated: bool = True) -> None:
        self._validated = validated

    def messages(self, value: Any, source: str, placeholders: Mapping[str, str]) -> list[Message]:
        return with_system_for_developer(super().messages(value, source, placeholders), source, self.separator)

    def nothing(self, as_list: bool) -> Any:
        return [] if as_list else ""

    def text(self, text: str, as_list: bool) -> Any:
        return [{"type": "text", "text": text}] if as_list else text

    def part(self, value: Any, where: str) -> str | None:
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and not _MEDIA.isdisjoint(value):
            raise PromptError(where, "only parts of type 'text' are supported")
        return text_of(value, where, _KINDS)

    def members(self, message: Message, content: Any, where: str) -> Message:
        role = message["role"]
        made: Message = {"role": role, "content": _unbilled(content) if role == "system" else content}
        if role == "assistant":
            calls = calls_of(message, where)
            if calls:
                made["tool_calls"] = [self._call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
            made |= _reasoning(message, where)
        elif role == "tool" and "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            made["name"] = message["name"]
        if role == "developer":
            made["tools"] = message.get("tools")
        return made

    def _call(self, call: dict[str, Any], where: str) -> dict[str, Any]:
        """Arguments that are not an object become an empty one, as in vLLM."""
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise PromptError(where, "must be the call of a function")
        given = function.get("arguments")
        if isinstance(given, str) and given:
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                given = None
        check_size(given, f"{where}.function.arguments")
        parsed = {"arguments": given if isinstance(given, dict) else {}}
        if not self._validated:
            return {**call, "function": {**function, **parsed}}
        called = parsed | {name: function[name] for name in ("name",) if name in function}
        members = {**call, "function": called}
        return {name: members[name] for name in ("id", "function", "type") if name in members}

    def tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Returns all tools, for every `tool_choice`: `--exclude-tools-when-tool-choice-none` is off by default."""
        tools = objects(body.get("tools"), "tools")
        if tools is None:
            return None
        if not tools:
            raise PromptError("tools", "must not be empty")
        return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]

    def variables(self, body: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the template's variables. The request's own effort wins, and switches thinking."""
        effort = body.get("reasoning_effort")
        if effort is None:
            return dict(given)
        named = {} if effort == "auto" else {"reasoning_effort": effort}
        return {"enable_thinking": effort != "none", **given, **named}

    def add_special_tokens(self, body: Mapping[str, Any]) -> bool:
        return flag(body, "add_special_tokens", False)


def _reasoning(message: Message, where: str) -> dict[str, str]:
    """Returns the reasoning under both names. A message with null content is validated as OpenAI's type, which has
    none.
    """
    text = message.get("reasoning")
    text = message.get("reasoning_content") if text is None else text
    if text is None or ("content" in message and message["content"] is None):
        return {}
    if not isinstance(text, str):
        raise PromptError(f"{where}.reasoning", "must be a string")
    return {"reasoning": text, "reasoning_content": text}


def _unbilled(content: Any) -> Any:
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(_BILLING) else content
    kept = [{**part, "text": _unbilled(part["text"])} for part in content]
    return [new for new, old in zip(kept, content, strict=True) if new["text"] or new == old]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the members of vLLM's type, in its order, null if absent."""
    function = tool.get("function")
    if not isinstance(function, dict):
        raise PromptError(f"{where}.function", "must be an object")
    deferred = function.get("defer_loading")
    deferred = tool.get("defer_loading") if deferred is None else deferred
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    more = {"strict": function.get("strict"), "defer_loading": deferred}
    made |= {name: value for name, value in more.items() if value is not None}
    shown: dict[str, Any] = {"type": tool.get("type", "function"), "function": made}
    if tool.get("defer_loading") is not None:
        shown["defer_loading"] = tool["defer_loading"]
    return shown
