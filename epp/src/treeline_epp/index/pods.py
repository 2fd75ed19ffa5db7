"""The index's record of each pod, and its results: hits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from treeline_epp.index.event_filter import Tier
from treeline_epp.index.matching import Level, Walk
from treeline_epp.index.node import Node

_MOST_ADAPTERS, _LONGEST_NAME = 1024, 512
"""Most adapter names that are kept for a pod, and the longest: an engine may name any number, of any length."""


@dataclass(eq=False, slots=True)
class Pod:
    """One publisher's place in the index. Fields are the index's own; readers may look at them.

    `row` is the owner's number for it, -1 without one: see `Index.holders`. `precise`: its events are in the tree, so
    predictions only bridge the time until events arrive. `blocks` counts held blocks, `staged` those of the snapshot
    that is arriving. `block_size` is that of its newest event, 0 before the first. `rebuild_wanted`: it holds other
    blocks than the index says, so its subscriptions must build its entries again.

    All this is about its device. `lower` are its tiers below that, from the first event of each on. Each is a `Pod` of
    its own, with another bit, and with `tier` set; all of them count skipped blocks together.
    """

    name: str
    scope: str
    row: int = -1
    bit: int = 0
    staging: int = 0
    staged: int = 0
    precise: bool = False
    blocks: int = 0
    block_size: int = 0
    group: int | None = None
    rebuild_wanted: bool = False
    aged: list[tuple[int, float]] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)
    copies: Counter[int] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    hit_caps: dict[Node, tuple[int, float]] = field(default_factory=dict)
    tier: Tier | None = None
    lower: dict[Tier, Pod] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """The bits of all blocks that it is known to hold."""
        bits = self.bit
        for aged, _ in self.aged:
            bits |= aged
        return bits

    def saw_adapter(self, name: str) -> bool:
        """Record an adapter that an event names. True for a new one; beyond the first `_MOST_ADAPTERS`, never."""
        if name in self.adapters or len(self.adapters) >= _MOST_ADAPTERS or len(name) > _LONGEST_NAME:
            return False
        self.adapters.add(name)
        return True

    def take_copy(self, block: int) -> bool:
        """Remove one copy of the block beyond the first; False if there is none."""
        left = self.copies.get(block, 0)
        if left > 1:
            self.copies[block] = left - 1
        elif left:
            del self.copies[block]
        return left > 0

    def capped(self, hit: Hit, path: Walk, now: float) -> Hit:
        """Return the hit, reduced by audits on its path."""
        for node, start in path.nodes:
            cap = self.hit_caps.get(node)
            if cap is None or cap[1] <= now:
                continue
            if hit.tokens > cap[0]:
                end = min(hit.end, start)
                return Hit(cap[0], end, end)
            if max(hit.host, hit.disk) > cap[0]:
                hit = replace(hit, host=min(hit.host, cap[0]), disk=min(hit.disk, cap[0]))
        return hit


class Hit(Struct, frozen=True, gc=False):
    """The part of a key that a pod holds: `tokens` confirmed by events, which are `end` bytes; predictions go to
    `reach` ≥ end. So many tokens are on its device; `host` are those there or in host memory, and `disk` those there,
    in host memory or on disk; 0 where it has no such tier.
    """

    tokens: int = 0
    end: int = 0
    reach: int = 0
    host: int = 0
    disk: int = 0


NO_HIT = Hit()


def level_hit(level: Level) -> Hit:
    """Return the hit of the pods of a level."""
    if not level.tokens and not level.reach:
        return NO_HIT
    return Hit(level.tokens, level.end, max(level.end, level.reach))


class Match(Struct, frozen=True):
    """The result of `Index.match`: `levels` are the hits of pods (bits), disjoint; `special` are the hits of pods with
    better data: from audits, or from other pickers. `matched` bytes of the key are in the tree. `lower` are, for pods
    with tiers below the device, the same levels when blocks of that tier count too, and those of the faster ones.
    """

    levels: Sequence[Level] = ()
    special: dict[Pod, Hit] = {}
    matched: int = 0
    lower: Mapping[Tier, Sequence[Level]] = {}

    @property
    def longest(self) -> Hit:
        """The longest confirmed hit of any pod, in any tier; zeros without one. O(levels)."""
        tokens = end = 0
        for levels in (self.levels, *self.lower.values()):
            for level in levels:
                if level.tokens > tokens:
                    tokens, end = level.tokens, level.end
        return Hit(tokens, end, end) if tokens else NO_HIT

    def hit(self, pod: Pod) -> Hit:
        """Return the hit of `pod`; zeros without one. O(levels)."""
        special = self.special.get(pod)
        if special is not None:
            return special
        for level in self.levels:
            if level.pods & pod.bit:
                found = level_hit(level)
                return found if not pod.lower else replace(found, **self._tiers(pod))
        return NO_HIT

    def of(self, pods: Iterable[Pod]) -> Match:
        """Return the hits of these pods alone. O(pods + levels)."""
        kept = set(pods)
        bits = sum(pod.bit for pod in kept)

        def some(levels: Sequence[Level]) -> list[Level]:
            return [replace(level, pods=level.pods & bits) for level in levels if level.pods & bits]

        special = {pod: hit for pod, hit in self.special.items() if pod in kept}
        lower = {tier: some(levels) for tier, levels in self.lower.items()}
        return Match(some(self.levels), special, self.matched, lower)

    def joined(self, other: Match) -> Match:
        """Return the hits of both, which are of different pods. O(levels)."""

        def both(one: Sequence[Level], two: Sequence[Level]) -> list[Level]:
            return sorted([*one, *two], key=lambda level: level.tokens, reverse=True)

        tiers = dict.fromkeys([*self.lower, *other.lower])
        lower = {tier: both(self.lower.get(tier, ()), other.lower.get(tier, ())) for tier in tiers}
        matched = max(self.matched, other.matched)
        return Match(both(self.levels, other.levels), {**self.special, **other.special}, matched, lower)

    def _tiers(self, pod: Pod) -> dict[str, int]:
        return {
            tier.value: next((level.tokens for level in levels if level.pods & pod.bit), 0)
            for tier, levels in self.lower.items()
        }


class PodBits:
    """The assignment of bits to pods. `owners` are the pods of all bits in use.

    A returned bit is *retired*: no match asks for it, but marks in the trees still have it. A round of sweeping removes
    these marks (`begin_round` … `end_round`), then the bit is free.
    """

    def __init__(self) -> None:
        self.owners: dict[int, Pod] = {}
        self.sweeping = 0
        self._retired = 0
        self._rows = np.full(64, -1, np.int32)
        self._free: list[int] = []
        self._slots = 0

    def take(self, pod: Pod) -> int:
        """Give a pod a bit; it may have several. O(log free)."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._slots
            self._slots += 1
            if slot >= len(self._rows):
                self._rows = np.concatenate((self._rows, np.full(len(self._rows), -1, np.int32)))
        self._rows[slot] = pod.row
        self.owners[1 << slot] = pod
        return 1 << slot

    def retire(self, bit: int) -> Pod:
        """Retire a bit; return the pod that had it. O(1)."""
        self._retired |= bit
        return self.owners.pop(bit)

    def rows(self, bits: int) -> npt.NDArray[np.int32]:
        """Return the rows of the pods with these bits. O(bits) at memory speed."""
        if (pod := self.owners.get(bits)) is not None:
            return np.array((pod.row,), np.int32)
        data = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
        slots = np.flatnonzero(np.unpackbits(data, bitorder="little"))
        return self._rows[slots]

    def begin_round(self) -> bool:
        """Begin a round: `sweeping` becomes the bits retired so far. Return False if there are none."""
        self.sweeping, self._retired = self._retired, 0
        return self.sweeping != 0

    def end_round(self) -> None:
        """Free the bits of this round: no mark has them any more. O(bits)."""
        for slot in range(self.sweeping.bit_length()):
            if self.sweeping >> slot & 1:
                heapq.heappush(self._free, slot)
        self.sweeping = 0

    def check(self) -> None:
        """Assert that each bit is in use, retired or free, and only one of these."""
        used = self._retired | self.sweeping
        assert not self._retired & self.sweeping
        for bit, pod in self.owners.items():
            assert bit in (pod.bit, pod.staging, *(aged for aged, _ in pod.aged))
            assert not used & bit
            used |= bit
        free = sum(1 << slot for slot in self._free)
        assert not used & free
        assert used | free == (1 << self._slots) - 1
