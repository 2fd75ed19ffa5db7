"""How clients share a bound: who has most entries loses one first, so a client with many pays for them itself."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
Owner = str | None
"""A client; None where all are one."""


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
