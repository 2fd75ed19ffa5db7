"""Pages on their way: whose keys and values somebody is about to put on the device, and who.

What a node of the radix tree holds is on the device. What is on its way is here, and its pages belong to its filler
until that ends: a request that computes its prompt today; what copies pages from elsewhere would be another. A filler
that is done has inserted into the tree what it filled; one that failed has not. Those who wait ask again in each step,
of the tree and of this, so that they find the pages, or nobody who fills them, and compute them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from treeline_runtime.kvcache.radix import TOKEN_BYTES

MIN_SHARED_TOKENS = 32
"""Waiting a step must be worth it: sequences that share less do not wait for each other."""

Place = tuple[str | None, bytes]


def place_of(key: bytes, namespace: str | None) -> Place:
    """Sequences that share MIN_SHARED_TOKENS have the same place."""
    return namespace, key[: MIN_SHARED_TOKENS * TOKEN_BYTES]


class Filling:
    """Each filler fills one sequence. Keys in bytes (`key_of`)."""

    def __init__(self) -> None:
        self._places: dict[Hashable, Place] = {}
        self._keys: defaultdict[Place, dict[Hashable, bytes]] = defaultdict(dict)

    def __contains__(self, filler: Hashable) -> bool:
        return filler in self._places

    def begin(self, filler: Hashable, key: bytes, namespace: str | None = None) -> None:
        """`filler` will put `key` into the tree, as far as it is not there, unless it fails."""
        assert filler not in self, f"fills two sequences: {filler}"
        place = self._places[filler] = place_of(key, namespace)
        self._keys[place][filler] = key

    def end(self, filler: Hashable) -> None:
        """It is done, or will never be. Idempotent."""
        place = self._places.pop(filler, None)
        if place is not None:
            del self._keys[place][filler]
            if not self._keys[place]:
                del self._keys[place]

    def brings(self, key: bytes, namespace: str | None, tokens: int) -> bool:
        """Whether the first `tokens` tokens of `key`, at least MIN_SHARED_TOKENS, are on their way."""
        keys = self._keys.get(place_of(key, namespace))
        if not keys:
            return False
        wanted = key[: tokens * TOKEN_BYTES]
        return any(filled.startswith(wanted) for filled in keys.values())

    def fillers(self) -> set[Hashable]:
        return set(self._places)
