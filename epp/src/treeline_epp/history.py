"""Routing history in the tree: what a routed request will have put into a pod's cache, before any event says so.

A *span* marks a part of an edge as predicted for a pod until a time. It begins where the pod's confirmed run ends, so a
prefix that events confirm costs nothing here. Events that confirm it shorten it (`confirm`), a request that failed
takes it back (`withdraw`), time ends it (`expire`), and a pod has a budget of bytes, the oldest spans going first.
For an engine without events the same spans, with a long life, are all there is.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from treeline_epp.lane import Lane
from treeline_epp.matching import walk
from treeline_epp.node import Node, join_spans
from treeline_epp.tree import Tree

#: A span is not renewed while at least this share of its life is left: hot prefixes would flood the queue.
_RENEW_SHARE = 0.75


@dataclass(slots=True)
class _Queue:
    """A pod's spans in the order in which they end. `size` is their bytes, never too low; entries may be outdated."""

    entries: deque[tuple[float, Node]] = field(default_factory=deque)
    size: int = 0


class History:
    """The spans of one tree. All times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    def moved(self, old: Node, new: Node) -> None:
        """`Tree` calls this when spans went from one node to another."""
        for bit, (_, _, ends_at) in (new.spans or {}).items():
            queue = self._queues.get(bit)
            if queue is not None:
                queue.entries.append((ends_at, new))

    def predict(
        self, tree: Tree, root: Node, key: bytes, begin: int, bit: int, now: float, life: float, budget: int
    ) -> None:
        """The pod with `bit` will soon hold bytes `begin` … of `key`, for `life` seconds; keep to `budget` bytes.

        O(bytes of the key) at memory speed.
        """
        if begin >= len(key):
            return
        tree.lay(root, key)
        queue = self._queues.setdefault(bit, _Queue())
        ends_at = now + life
        for node, start in reversed(walk(root, key).nodes):  # leaves first, so that they are the first to go
            low, high = max(begin - start, 0), min(len(node.text), len(key) - start)
            if low >= high:
                break
            spans = node.spans
            if spans is None:
                spans = node.spans = {}
            old = spans.get(bit)
            if old is not None and old[0] <= low and old[1] >= high and old[2] - now > _RENEW_SHARE * life:
                continue
            span = join_spans(old, (low, high, ends_at))
            spans[bit] = span
            queue.size += span[1] - span[0] - (old[1] - old[0] if old is not None else 0)
            queue.entries.append((ends_at, node))
        while queue.size > budget and queue.entries:
            self._pop(tree, bit, queue)

    def confirm(self, lane: Lane, bit: int) -> None:
        """Events say that the pod holds all blocks of `lane`: what is predicted up to there is known now. O(depth)."""
        queue = self._queues.get(bit)
        if queue is None:
            return
        node: Node | None = lane.node
        limit = lane.last_end()
        while node is not None:
            if node.spans is not None and bit in node.spans:
                low, high, ends_at = node.spans[bit]
                if high <= limit:
                    queue.size -= high - low
                    _drop(node, bit)
                elif low < limit:
                    queue.size -= limit - low
                    node.spans[bit] = (limit, high, ends_at)
            node = node.parent
            limit = len(node.text) if node is not None else 0

    def withdraw(self, tree: Tree, root: Node, key: bytes, bit: int, ends_at: float) -> None:
        """The prediction that ends at `ends_at` will not come true. O(bytes of the key) at memory speed."""
        queue = self._queues.get(bit)
        if queue is None:
            return
        for node, _ in reversed(walk(root, key).nodes):
            span = (node.spans or {}).get(bit)
            if span is not None and span[2] == ends_at:
                queue.size -= span[1] - span[0]
                _drop(node, bit)
                tree.settle(node)

    def forget(self, bit: int) -> None:
        """The pod is gone; a sweep takes its spans out of the tree."""
        self._queues.pop(bit, None)

    def expire(self, tree: Tree, now: float) -> None:
        """End spans whose time has come. O(ended spans)."""
        for bit in list(self._queues):
            queue = self._queues[bit]
            while queue.entries and queue.entries[0][0] <= now:
                self._pop(tree, bit, queue)
            if not queue.entries:
                del self._queues[bit]

    def size(self, bit: int) -> int:
        """Predicted bytes of a pod; never too low."""
        queue = self._queues.get(bit)
        return queue.size if queue is not None else 0

    def _pop(self, tree: Tree, bit: int, queue: _Queue) -> None:
        """Handle the oldest entry: end its span, unless it was renewed, which a later entry stands for."""
        ends_at, node = queue.entries.popleft()
        span = (node.spans or {}).get(bit)
        if span is not None and span[2] <= ends_at:
            queue.size -= span[1] - span[0]
            _drop(node, bit)
            tree.settle(node)


def reach(nodes: list[tuple[Node, int]], ends: dict[int, int], now: float) -> Iterator[tuple[int, int]]:
    """How far spans take pods beyond their confirmed runs on a walked path.

    `ends` maps each pod's bit to the byte where its confirmed run ends (absent: pods that do not count). Yields
    `(bit, byte after the last predicted one)` for those that get further. O(spans on the path).
    """
    reached: dict[int, int] = {}
    for node, start in nodes:
        for bit, (low, high, ends_at) in (node.spans or {}).items():
            at = reached.get(bit, ends.get(bit, -1))
            if start + low <= at < start + high and ends_at > now:
                reached[bit] = start + high
    return iter(reached.items())


def _drop(node: Node, bit: int) -> None:
    assert node.spans is not None
    del node.spans[bit]
    if not node.spans:
        node.spans = None
