"""A node of the radix tree: an edge of text, the block runs and predicted ranges on it, and what hangs below.

A node changes itself alone: `RadixTree` keeps what is known of all nodes (hashes, sizes) in step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from treeline_epp.index.block_run import BlockRun

PredictedRange = tuple[int, int, float]
"""A part of an edge: first byte, byte after the last, time at which the prediction ends."""

_MOST_GROUPS = 64
"""Of an edge that a match looks at. Ranges of one prompt on many pods are one group; a client that sends a prompt
longer and longer, to another pod each time, makes one each time."""
_NEVER = float("-inf")
NO_CHILDREN: dict[int, Node] = {}
"""The children of every leaf: one dict, never written."""
MAX_POD_RUNS, MAX_RUNS = 64, 1024
"""Runs that begin on one edge: of one pod, and of all. An engine that never announces the same blocks under the same
hashes, by mistake or on purpose, would have any number, and each one slows whatever passes that edge. Pods that draw
the seed of their hashes have one each (vLLM without PYTHONHASHSEED); salts that events do not name make more
(`extra_key` of SGLang)."""


class Ranges(dict[int, PredictedRange]):
    """Pod's bit → range. `groups` is kept until something changes, since a hot prefix is predicted for every pod."""

    __slots__ = ("_groups", "_until")

    def __init__(self, given: Mapping[int, PredictedRange] | None = None) -> None:
        super().__init__(given or {})
        self._groups: Sequence[tuple[int, int, int]] = ()
        self._until = _NEVER

    def __setitem__(self, bit: int, known: PredictedRange) -> None:
        super().__setitem__(bit, known)
        self._until = _NEVER

    def __delitem__(self, bit: int) -> None:
        super().__delitem__(bit)
        self._until = _NEVER

    def groups(self, now: float) -> Sequence[tuple[int, int, int]]:
        """`(first byte, byte after the last, bits of pods)` of the ranges that have not ended. O(1), after a change and
        where one has ended O(ranges)."""
        if now >= self._until:
            found: dict[tuple[int, int], int] = {}
            self._until = float("inf")
            for bit, (low, high, ends_at) in self.items():
                if ends_at > now:
                    found[low, high] = found.get((low, high), 0) | bit
                    self._until = min(self._until, ends_at)
            self._groups = [(low, high, bits) for (low, high), bits in islice(found.items(), _MOST_GROUPS)]
        return self._groups


class Node:
    """An edge and what hangs below it. `predicted` is None while there is none."""

    __slots__ = ("children", "parent", "predicted", "runs", "text")

    def __init__(self, text: bytes, parent: Node | None) -> None:
        self.text = text
        self.parent = parent
        self.children = NO_CHILDREN
        self.runs: tuple[BlockRun, ...] = ()
        self.predicted: Ranges | None = None

    @property
    def root(self) -> Node:
        """The root above it. O(depth)."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def adopt(self, child: Node) -> None:
        """Put `child` below this node, in place of whichever child begins with the same byte. O(1)."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[child.text[0]] = child
        child.parent = self

    def disown(self, child: Node) -> None:
        """Take `child` out. O(1)."""
        del self.children[child.text[0]]
        if not self.children:
            self.children = NO_CHILDREN
        child.parent = None

    def trim(self) -> None:
        """Forget holes at the ends of runs, and runs that are nothing but holes. O(runs)."""
        for run in self.runs:
            run.trim()
        if any(not run.ends for run in self.runs):
            self.runs = tuple(run for run in self.runs if run.ends)

    def held_bytes(self) -> int:
        """How much of the text a block or a prediction needs. O(runs + ranges)."""
        held = max((run.last_end() for run in self.runs), default=0)
        if self.predicted:
            held = max(held, max(end for _, end, _ in self.predicted.values()))
        return held

    def cut(self, at: int) -> tuple[Node, list[BlockRun]]:
        """Put a new node with the first `at` bytes between this one and its parent; this one keeps the rest.

        Returns the new node, and those of its runs whose blocks were in a run of this node before. O(edge).
        """
        assert self.parent is not None
        upper = Node(self.text[:at], None)
        self.parent.adopt(upper)
        self.text = self.text[at:]
        upper.adopt(self)
        above: list[BlockRun] = []
        below: list[BlockRun] = []
        heads: list[BlockRun] = []
        for run in self.runs:
            slot = run.count_until(at)
            if slot == len(run):
                run.node = upper
                above.append(run)
                continue
            if slot:
                head = BlockRun(upper, run.base, run.width, run.chain, run.ends, run.sets)
                run.chain, run.ends, run.sets = head.cut(slot)
                run.base += slot * run.width
                run.trim()
                head.trim()
                heads.append(head)
                above.append(head)
            run.shift(-at)
            below.append(run)
        upper.runs, self.runs = tuple(above), tuple(below)
        ranges = self.predicted
        if ranges is not None:
            above_it = {bit: (lo, min(hi, at), t) for bit, (lo, hi, t) in ranges.items() if lo < at}
            below_it = {bit: (max(lo - at, 0), hi - at, t) for bit, (lo, hi, t) in ranges.items() if hi > at}
            upper.predicted, self.predicted = Ranges(above_it) or None, Ranges(below_it) or None
        return upper, heads

    def merge_into(self, child: Node) -> None:
        """Let `child`, the only one, swallow this node, which is then out of the tree. O(both edges)."""
        assert self.parent is not None
        size = len(self.text)
        child.text = self.text + child.text
        for run in child.runs:
            run.shift(size)
        for run in self.runs:
            run.node = child
        child.runs = self.runs + child.runs
        self.parent.adopt(child)
        self.parent = None
        self.children = NO_CHILDREN
        self.runs = ()
        if self.predicted is not None or child.predicted is not None:
            ranges = {bit: (lo + size, hi + size, t) for bit, (lo, hi, t) in (child.predicted or {}).items()}
            for bit, predicted in (self.predicted or {}).items():
                ranges[bit] = join_ranges(ranges.get(bit), predicted)
            child.predicted = Ranges(ranges)
            self.predicted = None

    def has_room(self, bit: int) -> bool:
        """Whether another run of the pod with `bit` may begin here. O(segments)."""
        runs = self.runs
        if len(runs) < MAX_POD_RUNS:
            return True
        return len(runs) < MAX_RUNS and sum(run.is_of(bit) for run in runs) < MAX_POD_RUNS

    def join_run(self, run: BlockRun) -> list[BlockRun]:
        """Join a run that has changed to those that it continues or that continue it; as `join_runs`. O(runs)."""
        begin, first, end, last = run.base, run.chain[:8], run.after(), run.chain[-8:]
        near = [
            each
            for each in self.runs
            if (each.base == end and each.chain[:8] == last) or (each.chain[-8:] == first and each.after() == begin)
        ]
        return self.join_runs((run, *near)) if near else []

    def join_runs(self, among: Sequence[BlockRun] | None = None) -> list[BlockRun]:
        """Join runs that continue each other, of the node or `among` these of it. Returns those that have got longer.
        O(runs), where nearly all nodes have one."""
        among = self.runs if among is None else among
        longer: list[BlockRun] = []
        follow: dict[tuple[bytes, int], list[BlockRun]] = {}
        for run in among:
            follow.setdefault((run.chain[:8], run.base), []).append(run)
        for front in among:
            while front.ends:
                back = next(filter(front.is_continued_by, follow.get((front.chain[-8:], front.after()), ())), None)
                if back is None:
                    break
                front.append(back.chain[8:], back.ends, back.sets)
                back.ends = b""
                longer.append(front)
        if longer:
            self.runs = tuple(run for run in self.runs if run.ends)
        return [run for run in dict.fromkeys(longer) if run.ends]

    def check(self, max_edge: int) -> None:
        """Assert what always holds of one node and its children."""
        for key, child in self.children.items():
            assert child.parent is self
            assert child.text[0] == key
        if self.parent is None:
            return
        assert 1 <= len(self.text) <= max_edge
        if not self.children:
            assert self.children is NO_CHILDREN
            assert self.held_bytes() == len(self.text), (self.held_bytes(), self.text)
        if len(self.children) == 1:
            (child,) = self.children.values()
            assert len(self.text) + len(child.text) > max_edge, (self.text, child.text)
        for run in self.runs:
            assert run.node is self
            run.check()
        assert self.predicted != {}
        for lo, hi, _ in (self.predicted or {}).values():
            assert 0 <= lo < hi <= len(self.text)


def join_ranges(old: PredictedRange | None, new: PredictedRange) -> PredictedRange:
    """One range for two of the same pod: their union if they touch, else the one that ends later in time."""
    if old is None:
        return new
    if old[0] <= new[1] and new[0] <= old[1]:
        return min(old[0], new[0]), max(old[1], new[1]), max(old[2], new[2])
    return old if old[2] > new[2] else new
