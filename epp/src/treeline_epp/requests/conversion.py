"""What the conversions of other chat APIs into chat completions have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from treeline_wire.prompt import PromptError

from treeline_epp.requests.outline import count_values

Message = dict[str, Any]

MAX_CALL_VALUES: Final = 4096
"""Values in the arguments of all calls of one chat: they are read and written again, which costs by the value."""
_FEW: Final = 16


class Context(msgspec.Struct, frozen=True):
    """For whom a request is converted: `engine` is the type of engine, `inline_system` says whether its template takes
    a system message in the midst of a chat (and prints it, if `must_show`)."""

    engine: str
    inline_system: Callable[..., bool]


class Conversation(msgspec.Struct, frozen=True):
    """A chat completion's body. `complete`: False where a message follows that cannot be known here."""

    body: dict[str, Any]
    complete: bool = True


class Unknown(Exception):
    """What the engine makes of this cannot be known here: the key ends before it."""


def many_values(text: str) -> int:
    """How many values the arguments of a tool call have, which are JSON in a text: values that nobody has counted yet.
    0 where they are few. O(characters) at memory speed."""
    if text.count(",") + text.count("[") + text.count("{") < _FEW:
        return 0
    return count_values(text.encode("utf-8", "replace"))  # what is in strings of it costs nothing


def text_member(value: dict[str, Any], name: str, where: str, default: str | None = "") -> str | None:
    """A member that is a text; `default` where it is null or absent. Raises `PromptError`."""
    text = value.get(name)
    if text is None:
        return default
    if not isinstance(text, str):
        raise PromptError(f"{where}.{name}", "must be a string")
    return text


def blocks_of(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects that have a type. Raises `PromptError`."""
    if not isinstance(value, list):
        raise PromptError(where, "must be a string or a list")
    for i, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise PromptError(f"{where}[{i}]", "must be an object with a type")
    return value
