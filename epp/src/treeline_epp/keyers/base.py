"""The interface of keyers, which turn requests into keys of the index: see `PromptKeyer` and `HistoryKeyer`.

Their caches of chats are shared between clients by `Shares`: a client with many entries loses its own first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from treeline_wire.dialects import ChatDialect
from treeline_wire.prompt import Prompt

from treeline_epp.index.items import Items

K = TypeVar("K")
V = TypeVar("V")
Owner = str | None
"""A client; None where clients are not told apart."""
_FIRST_GUESS_BYTES_PER_TOKEN: Final = 4.0
_LEARNING_RATE: Final = 0.05


class Renderer(Protocol):
    """Renders chats to prompts. State learnt from one client's chats is used for that client alone."""

    def most(self, messages: Sequence[Any], client: Owner = None) -> int:
        """Return how many messages of this chat a rendering takes."""
        ...

    def whole(self, body: Mapping[str, Any], dialect: ChatDialect, client: Owner = None) -> Prompt | None:
        """Return the prompt of a chat; None if it cannot be rendered here. Raises `PromptError`, `TemplateError`."""
        ...

    def beginning(self, body: Mapping[str, Any], dialect: ChatDialect, client: Owner = None) -> Prompt | None:
        """Return the prompt up to the text of the last given message. None and errors as in `whole`."""
        ...

    def takes_lists(self, body: Mapping[str, Any], dialect: ChatDialect) -> bool:
        """Return whether the parts of a message are written one after another, in their order."""
        ...

    def shows(self, kind: str) -> bool:
        """Return whether prompts name items of this kind, an image or the like."""
        ...

    def inline_system(self, *, must_show: bool) -> bool:
        """Return whether a system message may stand in the middle of a chat; `must_show`: and is written."""
        ...


class Keyer(Protocol):
    """Turns requests into keys, and estimates tokens from keys. `renderer` makes prompts of chats, if they have any;
    `media` puts images into keys, if the model reads any.
    """

    @property
    def renderer(self) -> Renderer | None: ...

    @property
    def media(self) -> Items | None: ...

    def key(self, prompt: Prompt) -> bytes | None:
        """Return the key of a prompt; `None` if it has none here."""
        ...

    def estimate_tokens(self, key_bytes: int) -> int:
        """Estimate the tokens of a key of this many bytes."""
        ...

    def learn(self, key_bytes: int, tokens: int) -> None:
        """Learn that an engine counted `tokens` in a prompt whose key has `key_bytes`."""
        ...


class TokenLengths:
    """The mean bytes of a key per token, learnt from engines' counts."""

    def __init__(self) -> None:
        self.bytes_per_token = _FIRST_GUESS_BYTES_PER_TOKEN

    def estimate_tokens(self, key_bytes: int) -> int:
        """Estimate the tokens of a key of this many bytes."""
        return int(key_bytes / self.bytes_per_token) + 1

    def learn(self, key_bytes: int, tokens: int) -> None:
        """Learn that an engine counted `tokens` in a prompt whose key has `key_bytes`."""
        if tokens >= 16:  # short prompts are mostly template
            self.bytes_per_token += _LEARNING_RATE * (key_bytes / tokens - self.bytes_per_token)


class Shares(Generic[K, V]):
    """Entries by owner, at most `most` in all. Beyond that the owner with most entries loses its oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[Owner, dict[K, V]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, owner: Owner) -> dict[K, V]:
        """Return an owner's entries, the oldest first; do not write to them."""
        return self._of.get(owner, {})

    def put(self, owner: Owner, key: K, value: V) -> None:
        """Add its owner's newest entry. O(owners) when full."""
        self.drop(owner, key)
        self._of.setdefault(owner, {})[key] = value
        self._count += 1
        if self._count > self._most:
            largest, own = max(self._of.items(), key=lambda item: len(item[1]))
            self.drop(largest, next(iter(own)))

    def drop(self, owner: Owner, key: K) -> None:
        """Remove an entry, if it is present."""
        own = self._of.get(owner)
        if own is None or key not in own:
            return
        del own[key]
        self._count -= 1
        if not own:
            del self._of[owner]
