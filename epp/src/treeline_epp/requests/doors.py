"""The doors of an engine that take a prompt, and how what is said at each becomes a chat or a completion.

An engine turns the requests of its other chat APIs into chat completions and renders those; so do we, by its own rules
(wire's `apis`), before anything is rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from treeline_wire.apis import anthropic, responses
from treeline_wire.apis.conversion import Context, Conversation, Unknown

Convert = Callable[[Mapping[str, Any], list[Any], Context], Conversation]


class Door(msgspec.Struct, frozen=True):
    """A kind of request with a prompt. `prompt` are the members that may hold it; the first that is there does.

    `convert` makes a chat of the members and the messages; None where they are one already. `chat`: it has messages,
    not a text.
    """

    suffix: str
    prompt: tuple[str, ...]
    chat: bool = True
    convert: Convert | None = None
    salted: bool = True
    """Every engine that has this door reads a salt in its body."""

    @property
    def api(self) -> str:
        """What an engine calls it."""
        return self.suffix.rpartition("/")[2]


def _first_of_batch(body: Mapping[str, Any], chats: list[Any], _: Context) -> Conversation:
    """vLLM's batch: a list of conversations, of which the first gives the key, as of several texts."""
    return Conversation(
        {**body, "messages": chats[0] if chats else []}, Unknown("messages", "there are several conversations")
    )


_DOORS: Final = (
    Door("/chat/completions/batch", ("messages",), convert=_first_of_batch, salted=False),
    Door("/chat/completions", ("messages",)),
    Door("/completions", ("prompt",), chat=False),
    Door("/generate", ("text", "input_ids"), chat=False),
    Door("/v1/responses", ("input",), convert=responses.to_chat, salted=False),
    Door("/v1/messages", ("messages",), convert=anthropic.to_chat, salted=False),
)


def door_of(path: str) -> Door | None:
    """The door of a path (without query, without a slash at its end); None for one that has no prompt."""
    for door in _DOORS:
        if path.endswith(door.suffix):
            return door
    return None
