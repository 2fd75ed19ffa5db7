"""A node of the radix tree: an edge of text, the block runs and predicted ranges on it, and its children.

A node changes only itself: `RadixTree` keeps the data on all nodes (hashes, sizes) in step.

A block run is consecutive blocks of one hash chain inside one edge, packed. A block costs ten bytes here: eight of
hash, two of the byte offset in the edge at which it ends. The pods that hold it are kept once per segment, which is a
range of slots with the same pods. Nearly every edge has exactly one run with one segment; further runs appear where
chains fork without their text forking (another tokenization, a publisher with its own hash seed, another block size).

A slot that no pod holds any more, between slots that are held, is a hole: it keeps its hash and its end, since an
engine may drop an ancestor and keep its descendants.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from treeline_epp.index.ranges import Ranges, join_ranges

assert sys.byteorder == "little", "`BlockRun.count_until` reads packed offsets in the machine's order"

NO_PARENT = bytes(8)
"""The parent of a prompt's first block."""
KEY_MASK = (1 << 60) - 1
"""`RadixTree.blocks` is keyed by the low 60 bits of a hash: an int of them takes 32 bytes, of all 64 it takes 48."""
NO_CHILDREN: dict[int, Node] = {}
"""The children of every leaf: one dict, never written."""
MAX_POD_RUNS, MAX_RUNS = 64, 1024
"""Most runs that begin on one edge: of one pod, and of all. An engine that announces the same blocks under ever new
hashes, by mistake or on purpose, would have any number, and each one slows every walk over that edge. Pods with a
random hash seed have one each (vLLM without PYTHONHASHSEED); salts that events do not name make more (`extra_key` of
SGLang)."""


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Pack u64 hashes as bytes, eight each. Raises struct.error if one is out of range. O(n)."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def pack_ends(ends: Sequence[int], delta: int) -> bytes:
    """Pack offsets, moved by `delta`, as bytes, two each. O(n)."""
    return struct.pack(f"<{len(ends)}H", *[end + delta for end in ends])


def common_prefix(text: bytes, offset: int, data: bytes, at: int) -> int:
    """Return how many bytes `text` from `offset` and `data` from `at` have in common. O(bytes), in O(log) steps."""
    low, high = 0, min(len(text) - offset, len(data) - at)
    while low < high:
        middle = (low + high + 1) >> 1
        if data.startswith(text[offset + low : offset + middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low


def end_of_unknown(keys: Sequence[int], start: int, known: Set[int]) -> int:
    """`keys[start]` is unknown: return the first later index whose key is known; len(keys) if there is none."""
    if known.isdisjoint(keys[start:] if start else keys):
        return len(keys)
    return next(i for i in range(start + 1, len(keys)) if keys[i] in known)


def same_hashes(chain: bytes, offset: int, packed: bytes, at: int) -> int:
    """Return the bytes of whole hashes that `chain` from `offset` and `packed` from `at` have in common. O(bytes)."""
    size = min(len(chain) - offset, len(packed) - at)
    if chain[offset : offset + size] == packed[at : at + size]:
        return size
    return common_prefix(chain, offset, packed, at) & ~7


class BlockRun:
    """`node` is the edge; `base` counts the tokens before the first block, `width` those of each block.

    `chain` is the parent's hash and then each block's; `ends` each block's end in the edge's text, not decreasing;
    `sets` the bitset of pods that hold all blocks, or, if they differ, a list [end, set, end, set, …] of segments,
    where `end` is the slot after the segment and neighbouring sets differ.
    """

    __slots__ = ("base", "chain", "ends", "node", "sets", "width")

    def __init__(self, node: Node, base: int, width: int, chain: bytes, ends: bytes, sets: int | list[int]) -> None:
        self.node = node
        self.base = base
        self.width = width
        self.chain = chain
        self.ends = ends
        self.sets = sets

    def __len__(self) -> int:
        return len(self.ends) >> 1

    def end(self, slot: int) -> int:
        """Return the block's end in the edge's text, in bytes."""
        return self.ends[2 * slot] | self.ends[2 * slot + 1] << 8

    def last_end(self) -> int:
        """Return the last block's end."""
        return self.ends[-2] | self.ends[-1] << 8

    def hashes(self) -> tuple[int, ...]:
        """Return all hashes, holes included. O(n)."""
        return struct.unpack(f"<{len(self)}Q", self.chain[8:])

    def find(self, packed: bytes) -> int:
        """Return the slot of a packed hash, -1 if it is not here. One scan at memory speed."""
        at = self.chain.find(packed, 8)
        while at > 0 and at & 7:  # straddles two hashes: not a hit
            at = self.chain.find(packed, at + 1)
        return (at >> 3) - 1 if at > 0 else -1

    def slot(self, block: int) -> int:
        """Return the slot of a hash, -1 if it is not here. One scan at memory speed."""
        return self.find(block.to_bytes(8, "little"))

    def has_holes(self) -> bool:
        """Return whether a slot is held by no pod. O(segments)."""
        return isinstance(self.sets, list) and not all(self.sets[1::2])

    def after(self) -> int:
        """Return the tokens before a block that would follow the last one."""
        return self.base + len(self) * self.width

    def is_of(self, bit: int) -> bool:
        """Return whether the pod with `bit` holds any block of it. O(segments)."""
        sets = self.sets
        return bool(sets & bit) if isinstance(sets, int) else any(members & bit for members in sets[1::2])

    def is_continued_by(self, back: BlockRun) -> bool:
        """Return whether `back`, on the same edge, could be the end of this run. O(1) for runs without holes."""
        return (
            bool(back.ends)
            and back is not self
            and back.width == self.width
            and back.base == self.after()
            and back.chain[:8] == self.chain[-8:]
            and self.last_end() <= back.end(0)
            and disjoint(self, back.chain[8:], back)
        )

    def count_until(self, limit: int) -> int:
        """Return how many blocks end at or before byte `limit` of the edge. O(log n)."""
        return bisect_right(memoryview(self.ends).cast("H"), limit)

    def segments(self) -> list[tuple[int, int, int]]:
        """Return `(first slot, slot after the last, set)` of each segment."""
        sets = _flat(self.sets, len(self.ends) >> 1)
        starts = [0, *sets[:-2:2]]
        return list(zip(starts, sets[::2], sets[1::2], strict=True))

    def paint(self, start: int, stop: int, add: int, remove: int) -> list[tuple[int, int, int, int]]:
        """Add and remove pods in slots start … stop−1. Returns the parts that existed: (start, stop, old, new set).

        O(1) for a whole run of one segment, else O(segments).
        """
        sets = self.sets
        count = len(self.ends) >> 1
        if isinstance(sets, int) and start == 0 and stop == count:
            new = (sets | add) & ~remove
            self.sets = new
            return [(0, count, sets, new)]
        parts: list[tuple[int, int, int, int]] = []
        out: list[int] = []
        for first, after, old in self.segments():
            low, high = max(first, start), min(after, stop)
            if low >= high:
                _emit(out, after, old)
                continue
            if first < low:
                _emit(out, low, old)
            new = (old | add) & ~remove
            parts.append((low, high, old, new))
            _emit(out, high, new)
            if high < after:
                _emit(out, after, old)
        self.sets = out if len(out) > 2 else out[1]
        return parts

    def append(self, chain: bytes, ends: bytes, sets: int | list[int]) -> None:
        """Add blocks at the end; `sets` as in the class. O(bytes)."""
        mine = self.sets
        count = len(self.ends) >> 1
        self.chain += chain
        self.ends += ends
        if isinstance(mine, int) and mine == sets:
            return
        out = list(_flat(mine, count))
        added = _flat(sets, len(ends) >> 1)
        for after, members in zip(added[::2], added[1::2], strict=True):
            _emit(out, count + after, members)
        self.sets = out if len(out) > 2 else out[1]

    def cut(self, slot: int) -> tuple[bytes, bytes, int | list[int]]:
        """Keep the slots before `slot` (> 0) and return the rest's `chain` (with parent), `ends` and `sets`. O(n)."""
        rest_chain, rest_ends = self.chain[8 * slot :], self.ends[2 * slot :]
        sets = self.sets
        self.chain = self.chain[: 8 * slot + 8]
        self.ends = self.ends[: 2 * slot]
        if isinstance(sets, int):
            return rest_chain, rest_ends, sets
        kept: list[int] = []
        rest: list[int] = []
        for after, members in zip(sets[::2], sets[1::2], strict=True):
            if not kept or kept[-2] < slot:
                _emit(kept, min(after, slot), members)
            if after > slot:
                _emit(rest, after - slot, members)
        self.sets = kept if len(kept) > 2 else kept[1]
        return rest_chain, rest_ends, rest if len(rest) > 2 else rest[1]

    def trim(self) -> None:
        """Forget the holes at both ends; a run of nothing but holes becomes empty. O(bytes) if there are any."""
        sets = self.sets
        if isinstance(sets, int):
            if not sets:
                self.chain, self.ends = self.chain[:8], b""
            return
        if not sets[-1]:
            self.cut(sets[-4])
        if not sets[1]:
            slot = sets[0]
            self.chain, self.ends, self.sets = self.cut(slot)
            self.base += slot * self.width

    def shift(self, delta: int) -> None:
        """The edge's text begins `delta` bytes earlier (later if negative): move all ends. O(n)."""
        self.ends = pack_ends(struct.unpack(f"<{len(self)}H", self.ends), delta)

    def check(self) -> None:
        """Assert the invariants of a run in a tree."""
        count = len(self)
        assert count > 0
        assert len(self.chain) == 8 + 8 * count
        ends = struct.unpack(f"<{count}H", self.ends)
        assert list(ends) == sorted(ends), ends
        assert ends[0] >= 1, ends
        assert ends[-1] <= len(self.node.text), (ends, len(self.node.text))
        assert self.width > 0
        assert self.base >= 0
        assert (self.base == 0) <= (self.chain[:8] == NO_PARENT)
        if isinstance(self.sets, list):
            assert len(self.sets) >= 4, self.sets
            afters, members = self.sets[::2], self.sets[1::2]
            assert afters == sorted(set(afters)), afters
            assert afters[0] > 0
            assert afters[-1] == count
            assert all(a != b for a, b in pairwise(members)), members
        assert self.segments()[0][2], "holes at the beginning"
        assert self.segments()[-1][2], "holes at the end"
        assert all(members >= 0 for _, _, members in self.segments())

    def check_known(self, blocks: Mapping[int, BlockRun]) -> int:
        """Assert that `blocks` leads from each held hash to this run; return how many there are."""
        held = 0
        hashes = self.hashes()
        assert len(set(hashes)) == len(hashes), "a hash twice in one run"
        for first, after, pods in self.segments():
            for block in hashes[first:after] if pods else ():
                assert blocks[block & KEY_MASK] is self
                held += 1
        return held


def disjoint(run: BlockRun, packed: bytes, other: BlockRun | None = None) -> bool:
    """Return whether no slot of the run has one of these hashes, which no pod holds, or which belong to `other`.

    They can only be in holes, where publishers contradict each other. O(1) for runs without holes.
    """
    if not run.has_holes() and (other is None or not other.has_holes()):
        return True
    return not set(run.hashes()).intersection(struct.unpack(f"<{len(packed) >> 3}Q", packed))


def _flat(sets: int | list[int], count: int) -> list[int]:
    """Return the segments as a list, also where all `count` blocks have the same set. The list may be the run's own."""
    return [count, sets] if isinstance(sets, int) else sets


def _emit(out: list[int], after: int, members: int) -> None:
    """Append a segment, joined with the last one if it has the same members."""
    if out and out[-1] == members:
        out[-2] = after
    else:
        out.append(after)
        out.append(members)


class Node:
    """An edge and its children. `predicted` is None while there are no predictions."""

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
        """Put `child` below this node, in place of the child that begins with the same byte. O(1)."""
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
        """Drop holes at the ends of runs, and runs that have only holes. O(runs)."""
        for run in self.runs:
            run.trim()
        if any(not run.ends for run in self.runs):
            self.runs = tuple(run for run in self.runs if run.ends)

    def held_bytes(self) -> int:
        """Return how many bytes of the text blocks and predictions need. O(runs + ranges)."""
        held = max((run.last_end() for run in self.runs), default=0)
        if self.predicted:
            held = max(held, max(end for _, end, _ in self.predicted.values()))
        return held

    def cut(self, at: int) -> tuple[Node, list[BlockRun]]:
        """Put a new node with the first `at` bytes between this one and its parent; this one keeps the rest.

        Returns the new node, and its runs whose blocks were in a run of this node before. O(edge).
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
        """Merge this node into `child`, its only one; afterwards this node is out of the tree. O(both edges)."""
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
        """Return whether another run of the pod with `bit` may begin here. O(segments)."""
        runs = self.runs
        if len(runs) < MAX_POD_RUNS:
            return True
        return len(runs) < MAX_RUNS and sum(run.is_of(bit) for run in runs) < MAX_POD_RUNS

    def join_runs(self) -> list[BlockRun]:
        """Join runs that continue each other; return those that became longer. O(runs); nearly all nodes have one."""
        longer: list[BlockRun] = []
        follow: dict[tuple[bytes, int], list[BlockRun]] = {}
        for run in self.runs:
            follow.setdefault((run.chain[:8], run.base), []).append(run)
        for front in self.runs:
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
        """Assert the invariants of one node and its children."""
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
