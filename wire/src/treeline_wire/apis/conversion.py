"""The parts that conversions of chat APIs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from ..chat import ChatTemplate, TemplateBusyError, TemplateError
from ..errors import PromptError
from ..json_values import count_values, slow_numbers

Message = dict[str, Any]

MAX_CALL_VALUES: Final = 4096
"""The most values in the arguments of all calls of a chat; reading and writing them costs per value."""
PASSED: Final = ("model", "chat_template_kwargs", "cache_salt", "extra_key", "lora_path")
"""Members that are the same in a chat completion."""
_FEW: Final = 16
_SENTINEL: Final = "the system speaks again"


class Context(msgspec.Struct, frozen=True):
    """The target of a conversion. `engine`: the engine's type; `inline_system`: whether its template accepts a system
    message in the middle of a chat (and prints it, with `must_show`)."""

    engine: str
    inline_system: Callable[..., bool]


class Unknown(Exception):
    """A member whose effect in the engine is unknown here, so a key ends before it. `param` names it, `why` gives the
    reason.
    """

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param}: {why}")
        self.param = param
        self.why = why


class Conversation(msgspec.Struct, frozen=True):
    """A chat completion's body. `unknown`: why it ends before the request does; None if it is complete."""

    body: dict[str, Any]
    unknown: Unknown | None = None

    @property
    def complete(self) -> bool:
        """Whether no messages are missing."""
        return self.unknown is None


Convert = Callable[[Mapping[str, Any], list[Any], Context], Conversation]
"""Makes a chat of a request's body and its conversation."""


def takes_inline_system(template: ChatTemplate, *, must_show: bool) -> bool:
    """Whether a template accepts a system message inside a chat; `must_show`: and prints it. Raises `NeedsWorkerError`
    and `TemplateBusyError` like `ChatTemplate.render`."""
    said = (("system", "t"), ("user", "t"), ("system", _SENTINEL), ("user", "t"))
    messages = [{"role": role, "content": text} for role, text in said]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except TemplateBusyError:
        raise
    except TemplateError:
        return False
    return _SENTINEL in text or not must_show


def items_of(value: Any, name: str) -> list[Any]:
    """Returns input as a list of items; a text becomes a user message. Raises `PromptError`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PromptError(name, "must be a list")
    return value


def begins_answer(chat: list[Message]) -> bool:
    """Whether the last message is an answer to be continued."""
    last = chat[-1] if chat else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def many_values(text: str) -> int:
    """Counts the values in a tool call's arguments, which are JSON inside a text and were not counted with the body. 0
    if there are few. O(characters) at memory speed.
    """
    data = text.encode("utf-8", "replace")
    if data.count(b",") + data.count(b"[") + data.count(b"{") < _FEW and not slow_numbers(data):
        return 0
    return count_values(data)  # its strings cost nothing


def text_member(value: dict[str, Any], name: str, where: str, default: str | None = "") -> str | None:
    """Returns a member that is a text; `default` if it is null or absent. Raises `PromptError`."""
    text = value.get(name)
    if text is None:
        return default
    if not isinstance(text, str):
        raise PromptError(f"{where}.{name}", "must be a string")
    return text


def blocks_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Checks a list of objects with a type, and returns it. Raises `PromptError`."""
    if not isinstance(value, list):
        raise PromptError(where, "must be a string or a list")
    for i, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise PromptError(f"{where}[{i}]", "must be an object with a type")
    return value


def tools_of(body: Any) -> list[dict[str, Any]]:
    """Returns the tools of a request, or []. Raises `PromptError`."""
    tools = body.get("tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError("tools", "must be a list of objects")
    return tools


def function(**members: Any) -> dict[str, Any]:
    """Returns a tool in the format of chat completions, without null members."""
    return {"type": "function", "function": {name: value for name, value in members.items() if value is not None}}
