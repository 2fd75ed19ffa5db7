"""What turns requests into keys of the index, whatever it knows of the model: see `PromptKeyer` and `HistoryKeyer`.

What they remember of chats clients share by `Shares`: a client with many entries pays for them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from treeline_wire.dialects import ChatDialect
from treeline_wire.prompt import Prompt

K = TypeVar("K")
V = TypeVar("V")
Owner = str | None
"""A client; None where all are one."""
_FIRST_GUESS_BYTES_PER_TOKEN: Final = 4.0
_LEARNING_RATE: Final = 0.05


class Renderer(Protocol):
    """From chats to prompts. What was learnt of one client's chats counts for them alone."""

    def most(self, messages: Sequence[Any], client: Owner = None) -> int:
        """How many messages of this chat a rendering is given."""
        ...

    def whole(self, body: Mapping[str, Any], dialect: ChatDialect, client: Owner = None) -> Prompt | None:
        """The prompt of a chat; None where it has none here. Raises `PromptError`, `TemplateError`."""
        ...

    def beginning(self, body: Mapping[str, Any], dialect: ChatDialect, client: Owner = None) -> Prompt | None:
        """The prompt as far as the text of the last message that is given. None and raises as `whole`."""
        ...

    def takes_lists(self, body: Mapping[str, Any], dialect: ChatDialect) -> bool:
        """Whether the parts of a message are written one after another, as they are listed."""
        ...

    def inline_system(self, *, must_show: bool) -> bool:
        """Whether a system message may stand in the midst of a chat; `must_show`: and is written."""
        ...


class Keyer(Protocol):
    """From requests to keys, and from keys to numbers of tokens. `renderer` makes the prompts of chats; None where
    chats have none."""

    @property
    def renderer(self) -> Renderer | None: ...

    def key(self, prompt: Prompt) -> bytes | None:
        """The key of a prompt; `None` where it has none here."""
        ...

    def estimate_tokens(self, key_bytes: int) -> int:
        """How many tokens a key of so many bytes has, about."""
        ...

    def learn(self, key_bytes: int, tokens: int) -> None:
        """An engine counted `tokens` in a prompt whose key has `key_bytes`."""
        ...


class TokenLengths:
    """How many bytes of a key a token has: learnt from what engines report."""

    def __init__(self) -> None:
        self.bytes_per_token = _FIRST_GUESS_BYTES_PER_TOKEN

    def estimate_tokens(self, key_bytes: int) -> int:
        """How many tokens a key of so many bytes has, about."""
        return int(key_bytes / self.bytes_per_token) + 1

    def learn(self, key_bytes: int, tokens: int) -> None:
        """An engine counted `tokens` in a prompt whose key has `key_bytes`."""
        if tokens >= 16:  # short prompts are mostly template
            self.bytes_per_token += _LEARNING_RATE * (key_bytes / tokens - self.bytes_per_token)


class Shares(Generic[K, V]):
    """Entries by owner, at most `most` in all. Beyond them the owner that has most loses its oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[Owner, dict[K, V]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, owner: Owner) -> dict[K, V]:
        """Its entries, the oldest first; not to be written."""
        return self._of.get(owner, {})

    def put(self, owner: Owner, key: K, value: V) -> None:
        """The newest of its owner's. O(owners) where there is no more room."""
        self.drop(owner, key)
        self._of.setdefault(owner, {})[key] = value
        self._count += 1
        if self._count > self._most:
            largest, own = max(self._of.items(), key=lambda item: len(item[1]))
            self.drop(largest, next(iter(own)))

    def drop(self, owner: Owner, key: K) -> None:
        """Nothing where it is not there."""
        own = self._of.get(owner)
        if own is None or key not in own:
            return
        del own[key]
        self._count -= 1
        if not own:
            del self._of[owner]
