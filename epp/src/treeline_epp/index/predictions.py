"""Predictions in the tree: the prefixes that routed requests will put into pods' caches, before events confirm them.

A *predicted range* is a part of an edge, predicted for a pod until a time. It begins where the pod's confirmed blocks
end, so a prefix that events confirm costs nothing here. Events that confirm it shorten it (`confirm`), a failed request
drops it (`withdraw`), time ends it (`expire`), and a pod has a budget of bytes, in which the oldest go first. For an
engine without events the tree has only these ranges, with a long life.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from treeline_epp.index.matching import GUARD_BYTES, Level, Unite, Walk, walk
from treeline_epp.index.node import BlockRun, Node
from treeline_epp.index.radix_tree import RadixTree
from treeline_epp.index.ranges import Ranges, join_ranges

_RENEW_SHARE = 0.75
"""A range is not renewed while at least this share of its life is left: hot prefixes would flood the queue."""


@dataclass(slots=True)
class _Queue:
    """A pod's ranges in the order in which they end. `size` is their bytes, never too low; entries may be outdated."""

    entries: deque[tuple[float, Node]] = field(default_factory=deque)
    size: int = 0


class Predictions:
    """The ranges of one tree. All times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    def moved(self, old: Node, new: Node) -> None:
        """Follow ranges that went from one node to another; `RadixTree` calls this."""
        for bit, (_, _, ends_at) in (new.predicted or {}).items():
            queue = self._queues.get(bit)
            if queue is not None:
                queue.entries.append((ends_at, new))

    def predict(
        self,
        tree: RadixTree,
        root: Node,
        key: bytes,
        begin: int,
        bit: int,
        now: float,
        life: float,
        budget: int,
    ) -> None:
        """Predict that the pod with `bit` will hold bytes `begin` … of `key`, for `life` seconds; keep to `budget`
        bytes. O(bytes of the key) at memory speed.
        """
        if begin >= len(key):
            return
        path = walk(root, key)
        if path.matched < len(key):
            tree.lay(root, key)
            path = walk(root, key)
        queue = self._queues.setdefault(bit, _Queue())
        ends_at = now + life
        shortened: list[Node] = []
        for node, start in reversed(path.nodes):  # leaves first, so that they end first
            low, high = max(begin - start, 0), min(len(node.text), len(key) - start)
            if low >= high:
                break
            ranges = node.predicted
            if ranges is None:
                ranges = node.predicted = Ranges()
            old = ranges.get(bit)
            if old is not None and old[0] <= low and old[1] >= high and old[2] - now > _RENEW_SHARE * life:
                continue
            joined = join_ranges(old, (low, high, ends_at))
            ranges[bit] = joined
            if old is not None and joined[1] < old[1]:
                shortened.append(node)
            queue.size += joined[1] - joined[0] - (old[1] - old[0] if old is not None else 0)
            queue.entries.append((ends_at, node))
        for node in shortened:  # only after the walk, since it moves nodes
            tree.compact(node)
        while queue.size > budget and queue.entries:
            self._pop(tree, bit, queue)

    def confirm(self, tree: RadixTree, run: BlockRun, bit: int) -> None:
        """Shorten predictions that events confirm: the pod holds all blocks of `run`. O(depth).

        On an edge above, only the bytes up to the end of the chain's last block there are confirmed: the bytes after it
        begin a block that goes on below, another one in each branch.
        """
        queue = self._queues.get(bit)
        if queue is None:
            return
        for node, limit in _ends(tree, run):
            if node.predicted is None or bit not in node.predicted:
                continue
            low, high, ends_at = node.predicted[bit]
            if high <= limit:
                queue.size -= high - low
                _drop(node, bit)
            elif low < limit:
                queue.size -= limit - low
                node.predicted[bit] = (limit, high, ends_at)

    def withdraw(self, tree: RadixTree, root: Node, key: bytes, bit: int, ends_at: float) -> None:
        """Drop the prediction that ends at `ends_at`: it will not come true. O(bytes of the key) at memory speed."""
        queue = self._queues.get(bit)
        if queue is None:
            return
        for node, _ in reversed(walk(root, key).nodes):
            known = None if node.predicted is None else node.predicted.get(bit)
            if known is not None and known[2] == ends_at:
                queue.size -= known[1] - known[0]
                _drop(node, bit)
                tree.compact(node)

    def forget(self, bit: int) -> None:
        """Forget a removed pod; a sweep takes its ranges out of the tree."""
        self._queues.pop(bit, None)

    def expire(self, tree: RadixTree, now: float) -> None:
        """End ranges that have expired. O(ended ranges)."""
        for bit in list(self._queues):
            queue = self._queues[bit]
            while queue.entries and queue.entries[0][0] <= now:
                self._pop(tree, bit, queue)
            if not queue.entries:
                del self._queues[bit]

    def size(self, bit: int) -> int:
        """Return the predicted bytes of a pod; never too low."""
        queue = self._queues.get(bit)
        return queue.size if queue is not None else 0

    def _pop(self, tree: RadixTree, bit: int, queue: _Queue) -> None:
        """Handle the oldest entry: end its range, unless it was renewed and has a later entry."""
        ends_at, node = queue.entries.popleft()
        known = None if node.predicted is None else node.predicted.get(bit)
        if known is not None and known[2] <= ends_at:
            queue.size -= known[1] - known[0]
            _drop(node, bit)
            tree.compact(node)


def _ends(tree: RadixTree, run: BlockRun) -> Iterator[tuple[Node, int]]:
    """Yield the node of a run and all above it, each with the byte where the last block of the run's chain ends there;
    0 where none does.
    """
    node: Node | None = run.node
    above: BlockRun | None = run
    end = run.last_end()
    while node is not None:
        yield node, end if above is not None and above.node is node else 0
        while above is not None and above.node is node:
            parent, base = above.chain[:8], above.base
            above = tree.run_of(int.from_bytes(parent, "little")) if base else None
            if above is not None and above.base >= base:
                above = None  # the parent was removed, and its hash was stored again elsewhere
            if above is not None:
                end = above.end(above.find(parent))
        node = node.parent


def foreseen(levels: list[Level], path: Walk, unite: Unite | None, now: float) -> list[Level]:
    """Return the levels of a match (see `matching.match`), split by how far predictions extend them.

    A range counts if it continues its pod's blocks, proved or not, or another range. O(groups of ranges × levels),
    however many pods there are.
    """
    predicted = [(node.predicted, start) for node, start in path.nodes if node.predicted is not None]
    if not predicted:
        return levels
    here = {(max(level.end, level.held), number): level.pods for number, level in enumerate(levels)}
    for ranges, start in predicted:
        further: dict[tuple[int, int], int] = {}
        for low, high, bits in ranges.groups(now):
            bits, begin, stop = unite(bits) if unite else bits, start + low, start + high
            for at, pods in list(here.items()):
                if begin <= at[0] < stop and (moved := pods & bits):
                    here[at] ^= moved
                    further[stop, at[1]] = further.get((stop, at[1]), 0) | moved
        for at, pods in further.items():
            here[at] = here.get(at, 0) | pods
    found = []
    for (end, number), pods in here.items():
        level = levels[number]
        if pods:
            reach = min(end, path.matched - GUARD_BYTES) if end > max(level.end, level.held) else 0
            reach = reach if reach > level.end else 0
            found.append(Level(pods, level.tokens, level.end, level.held, reach))
    return found


def _drop(node: Node, bit: int) -> None:
    assert node.predicted is not None
    del node.predicted[bit]
    if not node.predicted:
        node.predicted = None
