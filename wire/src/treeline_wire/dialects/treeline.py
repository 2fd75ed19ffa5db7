"""Our runtime's dialect: the input that `transformers` would get, with vLLM's rules where needed.

Texts stay texts. Parts are a list for templates that take lists (by vLLM's rule), else joined by a newline. Null
content is an empty text. An unknown `developer` becomes system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import PromptError
from .base import (
    ChatDialect,
    Message,
    arguments_of,
    calls_of,
    check_size,
    objects,
    text_of,
    with_system_for_developer,
)

_KINDS: Final = {"text": "text", "refusal": "refusal"}
"""Part types and the member with their text; an assistant's refusal counts as its text."""


class TreelineDialect(ChatDialect):
    """Our runtime's dialect; see the module."""

    separator = "\n"

    def messages(self, value: Any, source: str, placeholders: Mapping[str, str]) -> list[Message]:
        return with_system_for_developer(super().messages(value, source, placeholders), source, self.separator)

    def part(self, value: Any, where: str) -> str | None:
        text = text_of(value, where, _KINDS)
        if text is None:
            raise PromptError(where, "only parts of type 'text' are supported")
        return text

    def text_part(self, part: Any, text: str) -> dict[str, Any]:
        return {"type": "text", **part} if part.get("type") != "refusal" else {"type": "text", "text": text}

    def members(self, message: Message, content: Any, where: str) -> Message:
        made = {**message, "content": content}
        calls = calls_of(message, where)
        if calls is not None:
            made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        return made

    def tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = objects(body.get("tools"), "tools")
        if tools and body.get("tool_choice") == "none":
            check_size(tools, "tools")  # a template does not get them, but an engine does
            return None
        return tools or None

    def variables(self, body: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the template's variables. An effort switches thinking under both names that templates use, as in
        SGLang; `chat_template_kwargs` override it.
        """
        effort = body.get("reasoning_effort")
        if effort is None:
            return dict(given)
        thinks = effort != "none"
        return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **given}


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = arguments_of(function["arguments"], where)
    if not isinstance(arguments, dict):
        raise PromptError(f"{where}.function.arguments", "must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
