"""Keys for pools without a tokenizer, in a form of our own: they are routed by the requests that went to them
before.
"""

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
"""Members that templates write at the beginning, if at all."""
_NOT_PROMPT: Final = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "refusal", "annotations"}
)
"""Members of a message that have their own place in the key, or that the next turn's prompt lacks: most templates leave
out earlier reasoning."""


class HistoryKeyer(TokenLengths):
    """Keys without a tokenizer, for pools that are routed by the requests that went to them before.

    The form is free, as long as requests begin alike when their prompts do: the key of a conversation's turn begins
    with the key of the turn before it, since no key ends with text that only the last turn has. Events do not know this
    form.
    """

    def __init__(self) -> None:
        super().__init__()
        self.renderer = HistoryRenderer()
        self.media = None  # its texts name images

    def key(self, prompt: Prompt) -> bytes:
        """Return the text itself; an id is an escape."""
        if prompt.ids is not None:
            return b"".join(map(escape, prompt.ids))
        return (prompt.text or "").encode()


class HistoryRenderer:
    """Writes tools and the like, then roles and contents in order."""

    def most(self, _messages: Sequence[Any], _client: Owner = None) -> int:
        """Return how many messages a rendering takes."""
        return MAX_MESSAGES

    def whole(self, body: Mapping[str, Any], _dialect: ChatDialect, _client: Owner = None) -> Prompt | None:
        """Return the prompt of a chat. Raises `PromptError`."""
        return self._rendered(body, open_end=body.get("continue_final_message") is True)

    def beginning(self, body: Mapping[str, Any], _dialect: ChatDialect, _client: Owner = None) -> Prompt | None:
        """Return the prompt up to the text of the last given message. Raises `PromptError`."""
        return self._rendered(body, open_end=True)

    def takes_lists(self, _body: Mapping[str, Any], _dialect: ChatDialect) -> bool:
        """Return True: parts are written in their order."""
        return True

    def shows(self, _kind: str) -> bool:
        """Return True: items are written like other parts."""
        return True

    def inline_system(self, *, must_show: bool) -> bool:
        """Return True: a system message is written like others."""
        return True

    def _rendered(self, body: Mapping[str, Any], *, open_end: bool) -> Prompt | None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return None
        admission = Admission()
        try:
            # Copies of plain values, down to this depth; other values are left out.
            first = {name: admission.plain(body[name]) for name in _BEFORE_MESSAGES if body.get(name)}
            if body.get("tool_choice") == "none":
                first.pop("tools", None)
            chat = [admission.plain(message) for message in messages]
        except TooLargeError as error:
            if error.deep:
                raise TooDeep("messages", "or their tools and documents are nested too deeply") from None
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
    """Return the texts of messages, each in a few parts. `open_end`: the last one is to be continued."""
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
