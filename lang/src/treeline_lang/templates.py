"""Chat turns as text: what a model's chat template writes before and after each.

A state is a growing text, so a turn's beginning must be known before its end. If the server renders chats, the pieces
are found by rendering some with known contents (`derive`); otherwise one of `TEMPLATES` is used.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from treeline_lang.errors import Refused, TemplateError
from treeline_lang.expressions import ROLES, Role

Message = dict[str, str]
Render = Callable[[list[Message], bool], Awaitable[str]]
"""(messages, whether to open the assistant's turn) → the rendered text."""


@dataclass(frozen=True, slots=True)
class Turn:
    prefix: str
    suffix: str
    opening: str | None = None
    """Used instead of `prefix` at the beginning of the chat."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    turns: Mapping[Role, Turn]
    stop: tuple[str, ...] = ()
    """Texts that end an assistant's turn if the model's end of text does not."""
    missing: Mapping[Role, str] = field(default_factory=dict)
    """Why there is no such turn."""

    def begin(self, role: Role, first: bool) -> str:
        """The text before a turn. Raises TemplateError for a role that the model does not know."""
        turn = self.turn(role)
        return turn.opening if first and turn.opening is not None else turn.prefix

    def end(self, role: Role) -> str:
        return self.turn(role).suffix

    def turn(self, role: Role) -> Turn:
        if role not in self.turns:
            raise TemplateError(f"the model's chat template has no turn of the {role}: {self.missing.get(role, '')}")
        return self.turns[role]


def _alike(begin: Callable[[Role], str], end: str, stop: str) -> ChatTemplate:
    """A template that writes all roles alike."""
    return ChatTemplate({role: Turn(begin(role), end) for role in ROLES}, (stop,))


TEMPLATES: Final[dict[str, ChatTemplate]] = {
    "chatml": _alike(lambda role: f"<|im_start|>{role}\n", "<|im_end|>\n", "<|im_end|>"),
    "llama-3": _alike(lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<|eot_id|>"),
    "plain": _alike(lambda role: f"{role.upper()}: ", "\n", "\nUSER:"),
}
"""Templates for servers that do not render chats. `plain` is for models without chat training."""


def named(template: str | ChatTemplate | None) -> ChatTemplate | None:
    """One of TEMPLATES by name; anything else is returned as it is. Raises ValueError for an unknown name."""
    if not isinstance(template, str):
        return template
    if template not in TEMPLATES:
        raise ValueError(f"chat_template is one of {', '.join(TEMPLATES)}, not {template!r}")
    return TEMPLATES[template]


_SYSTEM, _USER, _ASSISTANT, _LATER = (f"treeline{word}mark" for word in ("system", "user", "assistant", "later"))


def _message(role: Role, content: str) -> Message:
    return {"role": role, "content": content}


async def derive(render: Render, start: str = "") -> ChatTemplate:
    """The pieces of a chat template. `start`: what the tokenizer adds before every text (`<s>`), which must not be
    there twice. Raises TemplateError if the pieces cannot be found.
    """
    user, answered = _message("user", _USER), _message("assistant", _ASSISTANT)
    alone = await render([user], False)
    asked = await render([user], True)
    turns = await render([user, answered, _message("user", _LATER)], False)
    opening, user_suffix = _around(alone, _USER)
    before, asking = _around(asked, _USER)
    if before != opening:
        raise TemplateError("opening the assistant's turn changes the text before it")
    if not asking.startswith(user_suffix):  # it ends a chat that is over by a token of its own
        user_suffix = _common_prefix(asking, user_suffix)
    between = _between(turns, _ASSISTANT, _LATER)
    ended = await render([user, answered], False)
    assistant_suffix = _around(ended, _ASSISTANT)[1]
    if not between.startswith(assistant_suffix):
        assistant_suffix = _common_prefix(between, assistant_suffix)
    user_prefix = between[len(assistant_suffix) :]
    known: dict[Role, Turn] = {
        "user": Turn(user_prefix, user_suffix, opening.removeprefix(start)),
        "assistant": Turn(asking[len(user_suffix) :], assistant_suffix),
    }
    missing: dict[Role, str] = {}
    try:
        first = await render([_message("system", _SYSTEM), user], False)
        opening = _around(first, _SYSTEM)[0]
        between = _between(first, _SYSTEM, _USER)
        if not between.endswith(user_prefix):
            raise TemplateError("it is part of the user's turn: put it there")
        suffix = between[: len(between) - len(user_prefix)]
        known["system"] = Turn(opening.removeprefix(start), suffix)
    except (TemplateError, Refused) as error:
        missing["system"] = error.reason
    return ChatTemplate(known, (), missing)


def _around(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise TemplateError(f"it does not show the content of a turn once: {text[:500]!r}")
    return before, after


def _between(text: str, first: str, second: str) -> str:
    return _around(_around(text, first)[1], second)[0]


def _common_prefix(one: str, other: str) -> str:
    """The common beginning, without a special token (`<…`) that only begins alike."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return re.sub(r"<[^<>]*$", "", one[:length])
