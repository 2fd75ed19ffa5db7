"""SGLang's dialect, as of 0.5.23.

Sources: sglang/srt/parser/jinja_template_utils.py (`process_content_for_template_format`),
sglang/srt/entrypoints/openai/serving_chat.py (`_process_messages`, `_apply_jinja_template`,
`_handle_last_assistant_message`, `normalize_tool_content`) and sglang/srt/entrypoints/openai/protocol.py
(`normalize_reasoning_inputs`). Models with an encoder of their own (DeepSeek V3.2, Kimi K3) do not use their template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import PromptError
from .base import ChatDialect, Message, Turn, arguments_of, calls_of, objects, text_of
from .content_format import takes_lists_in_sglang

_KINDS: Final = {"text": "text", "input_text": "text"}
_MEMBERS: Final = ("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")


class SglangDialect(ChatDialect):
    """SGLang's dialect; see the module."""

    separator = " "
    flat_tools = True

    def takes_lists(self, source: str) -> bool:
        return takes_lists_in_sglang(source)

    def turn(self, body: Mapping[str, Any], source: str, placeholders: Mapping[str, str]) -> Turn:
        """Returns the conversation, which always ends with the user: an assistant's last text is appended to the
        rendered prompt or becomes a user message.
        """
        messages = self.messages(body.get("messages"), source, placeholders)
        suffix = ""
        last = messages[-1]
        if last["role"] == "assistant" and isinstance(last["content"], str):
            if body.get("continue_final_message") is True:
                suffix = last["content"]
                messages = messages[:-1]
                if not messages:
                    raise PromptError("messages", "there is no message before the one to be continued")
            else:
                messages = [*messages[:-1], {"role": "user", "content": last["content"]}]
        return Turn(messages, True, False, suffix)

    def part(self, value: Any, where: str) -> str | None:
        if isinstance(value, dict) and value.get("type") in ("thinking", "reasoning"):
            return None
        text = text_of(value, where, _KINDS)
        if text is None:
            raise PromptError(where, "`text` must be a string")
        return text

    def members(self, message: Message, content: Any, where: str) -> Message:
        role = message["role"].lower() if message["role"] != "user" else "user"
        # A list goes after the other members.
        behind = isinstance(content, list)
        made: Message = {"role": role} if behind else {"role": role, "content": content}
        if role != "user":
            calls = calls_of(message, where)
            for name in _MEMBERS:
                if name == "tool_calls" and calls is not None:
                    made[name] = [_call(call, f"{where}.tool_calls[{i}]", role) for i, call in enumerate(calls)]
                elif message.get(name) is not None:
                    made[name] = message[name]
        if behind:
            made["content"] = content
        return made

    def tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = objects(body.get("tools"), "tools")
        choice = body.get("tool_choice")
        if not tools or choice == "none":
            return None
        if isinstance(choice, dict):
            named = choice.get("function")
            name = named.get("name") if isinstance(named, dict) else None
            tools = [tool for tool in tools if _function(tool, "tools").get("name") == name]
        return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None

    def variables(self, body: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        effort = body.get("reasoning_effort")
        thinking = None
        reasoning = body.get("reasoning")
        if isinstance(reasoning, dict):
            asked = reasoning.get("effort")
            asked = reasoning.get("reasoning_effort") if asked is None else asked
            effort = effort if asked is None else asked
            thinking = True if reasoning.get("enabled", reasoning.get("enable")) is True else None
        if effort is not None:
            thinking = effort != "none"
        found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if thinking is not None:
            found |= {"thinking": thinking, "enable_thinking": thinking}
        return {**found, **given}

    def documents(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Returns None: SGLang's chat completions have no documents."""
        del body
        return None


def _call(call: dict[str, Any], where: str, role: str) -> dict[str, Any]:
    """Returns all members of SGLang's type, null if absent; an assistant's arguments become an object."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise PromptError(f"{where}.function", "must be an object")
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        arguments = arguments_of(arguments or " ", where)
        if not isinstance(arguments, dict):
            raise PromptError(f"{where}.function.arguments", "must be a JSON object")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise PromptError(f"{where}.function", "must be an object")
    return function


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the function's members in the client's order, then absent ones as null."""
    function = _function(tool, where)
    deferred = function.get("defer_loading")
    values: dict[str, Any] = {name: function.get(name) for name in ("description", "name", "parameters")}
    values["strict"] = function.get("strict")
    values["defer_loading"] = tool.get("defer_loading") if deferred is None else deferred
    shown = {
        name: value for name, value in values.items() if value is not None or name not in ("strict", "defer_loading")
    }
    ordered = {name: shown[name] for name in (*function, *shown) if name in shown}
    return {
        "type": tool.get("type", "function"),
        "function": ordered,
        "defer_loading": tool.get("defer_loading"),
    }
