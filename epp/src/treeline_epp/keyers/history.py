"""Prompts without a tokenizer, in a form of our own: for pools that are routed by what went to them before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from treeline_wire.chat import Admission, TooLargeError
from treeline_wire.dialects import ChatDialect
from treeline_wire.keys import escape
from treeline_wire.prompt import Prompt, PromptError, TooDeep

from treeline_epp.keyers.base import Owner, TokenLengths
from treeline_epp.keyers.prompt_keyer import MAX_MESSAGES

_BEFORE_MESSAGES: Final = ("tools", "documents", "chat_template_kwargs", "reasoning_effort")
"""What templates write at the beginning, if they write it at all."""
_NOT_PROMPT: Final = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "refusal", "annotations"}
)
"""Members of a message that have a place of their own, or that the next turn's prompt has not: most templates leave out
what the model thought before."""


class HistoryKeyer(TokenLengths):
    """Keys without a tokenizer, for pools that are routed by what went to them before.

    Any form will do in which requests begin alike when their prompts do: the key of a conversation's turn begins with
    the key of the turn before it, since no turn ends with what only the last one has. Events know nothing of this form.
    """

    def __init__(self) -> None:
        super().__init__()
        self.renderer = HistoryRenderer()

    def key(self, prompt: Prompt) -> bytes:
        """The text itself; an id is an escape."""
        if prompt.ids is not None:
            return b"".join(map(escape, prompt.ids))
        return (prompt.text or "").encode()


class HistoryRenderer:
    """Tools and the like, then roles and contents in order."""

    def most(self, _messages: Sequence[Any], _client: Owner = None) -> int:
        """How many messages a rendering is given."""
        return MAX_MESSAGES

    def whole(self, body: Mapping[str, Any], _dialect: ChatDialect, _client: Owner = None) -> Prompt | None:
        """The prompt of a chat. Raises `PromptError`."""
        return self._rendered(body, open_end=body.get("continue_final_message") is True)

    def beginning(self, body: Mapping[str, Any], _dialect: ChatDialect, _client: Owner = None) -> Prompt | None:
        """The prompt as far as the text of the last message that is given. Raises `PromptError`."""
        return self._rendered(body, open_end=True)

    def takes_lists(self, _body: Mapping[str, Any], _dialect: ChatDialect) -> bool:
        """They are written as they are listed."""
        return True

    def inline_system(self, *, must_show: bool) -> bool:
        """A system message is one like others."""
        return True

    def _rendered(self, body: Mapping[str, Any], *, open_end: bool) -> Prompt | None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return None
        admission = Admission()
        try:
            # Copies of plain values, so deep at most; the others are as good as not there.
            first = {name: admission.plain(body[name]) for name in _BEFORE_MESSAGES if body.get(name)}
            if body.get("tool_choice") == "none":
                first.pop("tools", None)
            chat = [admission.plain(message) for message in messages]
        except TooLargeError as error:
            if error.deep:
                raise TooDeep("messages", "or what goes with them is nested too deeply") from None
            return None
        except ValueError:
            return None
        parts = [_json(first)] if first else []
        parts += _messages(chat, open_end=open_end)
        text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError("messages", "contains half of a surrogate pair") from None
        return Prompt(text, None, False)


def _messages(chat: Iterable[Any], *, open_end: bool) -> list[str]:
    """The texts of messages, each in a few parts. `open_end`: the last one is to be continued."""
    parts: list[str] = []
    for message in chat:
        if not isinstance(message, dict):
            parts += ["<|?|>", _json(message), "\n"]
            continue
        others = {name: value for name, value in message.items() if name not in _NOT_PROMPT and value}
        parts += ["<|", str(message.get("role")), "|>", _json(others) if others else "", "\n"]
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
            parts.append(text if isinstance(text, str) else "" if text is None else _json(text))
        parts.append("\n")
    return parts[:-1] if open_end else parts


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
