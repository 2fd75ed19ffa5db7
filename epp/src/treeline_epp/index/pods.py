"""What the index knows of each pod, and what it answers: hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from treeline_epp.index.matching import Level, Walk
from treeline_epp.index.node import Node

_MOST_ADAPTERS, _LONGEST_NAME = 1024, 512
"""Names of adapters that are kept for a pod: an engine may name any number, of any length."""


@dataclass(eq=False, slots=True)
class Pod:
    """One publisher's place in the index. Fields are the index's own; readers may look at them.

    `row` is the owner's number for it, -1 without one: see `Index.holders`. `precise`: its events are in the tree, so
    predictions only bridge the time until events arrive. `blocks` counts held blocks, `staged` those of the snapshot
    that is being taken in. `block_size` is that of its
    newest event, 0 before the first. `rebuild_wanted`: it was found to hold other blocks than the index says; whoever
    follows its events builds it anew.
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

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Everything that it is known to hold."""
        bits = self.bit
        for aged, _ in self.aged:
            bits |= aged
        return bits

    def saw_adapter(self, name: str) -> bool:
        """An event names this LoRA adapter. True for the first time; beyond the first `_MOST_ADAPTERS`, never."""
        if name in self.adapters or len(self.adapters) >= _MOST_ADAPTERS or len(name) > _LONGEST_NAME:
            return False
        self.adapters.add(name)
        return True

    def take_copy(self, block: int) -> bool:
        """One copy of the block beyond the first is gone; False if there is none."""
        left = self.copies.get(block, 0)
        if left > 1:
            self.copies[block] = left - 1
        elif left:
            del self.copies[block]
        return left > 0

    def capped(self, hit: Hit, path: Walk, now: float) -> Hit:
        """The hit, or as much of it as audits on its path have left."""
        for node, start in path.nodes:
            cap = self.hit_caps.get(node)
            if cap is not None and cap[1] > now and hit.tokens > cap[0]:
                end = min(hit.end, start)
                return Hit(cap[0], end, end)
        return hit


class Hit(Struct, frozen=True, gc=False):
    """What a pod holds of a key: `tokens` confirmed by events, that is `end` bytes; predictions go to `reach` ≥ end."""

    tokens: int = 0
    end: int = 0
    reach: int = 0


NO_HIT = Hit()


def level_hit(level: Level) -> Hit:
    """What the pods of a level hold."""
    if not level.tokens and not level.reach:
        return NO_HIT
    return Hit(level.tokens, level.end, max(level.end, level.reach))


class Match(Struct, frozen=True):
    """The result of `Index.match`: `levels` say what pods (bits) hold, disjoint; `special` are the hits of pods
    of which more is known: by audits, or by other pickers. `matched` bytes of the key are in the tree."""

    levels: Sequence[Level] = ()
    special: dict[Pod, Hit] = {}
    matched: int = 0

    @property
    def longest(self) -> Hit:
        """What is confirmed of any pod; zeros if nothing. O(levels)."""
        tokens = end = 0
        for level in self.levels:
            if level.tokens > tokens:
                tokens, end = level.tokens, level.end
        return Hit(tokens, end, end) if tokens else NO_HIT

    def hit(self, pod: Pod) -> Hit:
        """What `pod` holds; zeros if nothing. O(levels)."""
        special = self.special.get(pod)
        if special is not None:
            return special
        for level in self.levels:
            if level.pods & pod.bit:
                return level_hit(level)
        return NO_HIT
