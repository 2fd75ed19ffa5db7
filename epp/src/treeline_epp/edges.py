"""The shape of the tree: edges of text that are walked, cut, merged and given up. What lies on them moves along.

See `tree` for what an edge is and what always holds; this module keeps it so where texts diverge or are forgotten.
"""

from collections.abc import Callable, Iterator
from itertools import repeat

from treeline_epp.lane import KEY_MASK, Lane, common_prefix, disjoint
from treeline_epp.node import NO_CHILDREN, Node, join_spans

#: Longest edge in bytes. Long enough that a match costs few steps, short enough that cutting an edge is cheap.
MAX_EDGE = 8192


class Edges:
    """Roots by namespace and all that hangs below them; `blocks` leads from a held hash to its lane.

    `moved(old, new)` is called when spans move to another node (a split or a merge), after they have.
    """

    def __init__(self, max_edge: int = MAX_EDGE, moved: "Callable[[Node, Node], None] | None" = None) -> None:
        assert 1 <= max_edge <= 0xFFFF
        self.max_edge = max_edge
        self.roots: dict[str | None, Node] = {}
        self.blocks: dict[int, Lane] = {}
        self.text_bytes = 0
        self.node_count = 0
        self._moved = moved or _ignore_move
        self._sweeping: list[Node] = []

    def root(self, namespace: str | None) -> Node:
        """The root of a namespace, made on first use. O(1)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", None)
        return root

    def prune_roots(self) -> None:
        """Forget empty namespaces. O(namespaces)."""
        for namespace in [name for name, root in self.roots.items() if not root.children]:
            del self.roots[namespace]

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first. The tree must not change meanwhile."""
        stack = [node for root in self.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def lane_of(self, block: int) -> Lane | None:
        """The lane of a block that some pod holds. O(lane)."""
        lane = self.blocks.get(block & KEY_MASK)
        return lane if lane is not None and lane.slot(block) >= 0 else None

    # For the tree

    def _walk(
        self, node: Node, offset: int, data: bytes, visit: "Callable[[Node, int, int, int], None]"
    ) -> None:
        """Follow `data` down from byte `offset` of `node`, making what is missing, splitting where it diverges.

        `visit(node, start, stop, offset)` is called for every node, in order: bytes start … stop−1 of `data` lie in it
        from `offset` on. A later split may still merge the node into the next.
        """
        at, size = 0, len(data)
        while True:
            text = node.text
            room = len(text) - offset
            take = min(room, size - at)
            if take and not data.startswith(
                text[offset : offset + take] if offset or take < room else text, at
            ):
                take = common_prefix(text, offset, data, at)
                node, offset = self._split(node, offset + take, offset)
                room = take
            if take < room or at + take == size:
                visit(node, at, at + take, offset)
                return
            child = node.children.get(data[at + take])
            if child is None and not node.children and node.parent is not None:
                grow = min(self.max_edge - len(node.text), size - at - take)
                if grow > 0:
                    node.text += data[at + take : at + take + grow]
                    self.text_bytes += grow
                    take += grow
            visit(node, at, at + take, offset)
            at += take
            if at == size:
                return
            if child is None:
                child = Node(data[at : at + self.max_edge], None)
                node.adopt(child)
                self.text_bytes += len(child.text)
                self.node_count += 1
            node, offset = child, 0

    def _point(self, lane: Lane) -> None:
        """Make `blocks` point to `lane` for its held slots."""
        hashes = lane.hashes()
        for first, after, pods in lane.runs():
            if pods:
                keys = [block & KEY_MASK for block in hashes[first:after]]
                self.blocks.update(zip(keys, repeat(lane), strict=False))

    def _split(self, node: Node, at: int, offset: int) -> tuple[Node, int]:
        """Cut the edge after `at` bytes and restore the invariants, the missing second child of the upper part apart.

        Returns the upper part and where byte `offset` of `node` is in it. O(edge).
        """
        upper = self._cut(node, at)
        if len(node.children) == 1:
            self._merge_down(node)
        above = upper.parent
        if above is not None and len(above.children) == 1:
            before = len(upper.text)
            self._merge_down(above)
            offset += len(upper.text) - before
        return upper, offset

    def _cut(self, node: Node, at: int) -> Node:
        """Cut the edge after `at` bytes; returns the new upper node, `node` keeps the rest. O(edge)."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.text[:at], None)
        self.node_count += 1
        parent.adopt(upper)
        node.text = node.text[at:]
        upper.adopt(node)
        upper_lanes: list[Lane] = []
        lower_lanes: list[Lane] = []
        for lane in node.lanes:
            slot = lane.count_until(at)
            if slot == len(lane):
                lane.node = upper
                upper_lanes.append(lane)
                continue
            if slot:
                head = Lane(upper, lane.base, lane.width, lane.chain, lane.ends, lane.sets)
                lane.chain, lane.ends, lane.sets = head.cut(slot)
                lane.base += slot * lane.width
                lane.trim()
                head.trim()
                self._point(head)
                upper_lanes.append(head)
            lane.shift(-at)
            lower_lanes.append(lane)
        upper.lanes = tuple(upper_lanes)
        node.lanes = tuple(lower_lanes)
        if node.spans is not None:
            spans = node.spans
            upper.spans = {bit: (lo, min(hi, at), t) for bit, (lo, hi, t) in spans.items() if lo < at} or None
            node.spans = {
                bit: (max(lo - at, 0), hi - at, t) for bit, (lo, hi, t) in spans.items() if hi > at
            } or None
            self._moved(node, upper)
        if self._sweeping:
            self._sweeping.append(upper)
        return upper

    def _settle_all(self, nodes: "dict[Node, None]") -> None:
        for (
            node
        ) in nodes:  # all of them before the first merge, which may move lanes into a node not among these
            node.trim()
        for node in nodes:
            self.settle(node)

    def settle(self, node: Node) -> None:
        """Restore the invariants around a node that lost marks or spans, up to the root if need be. O(edge) each.

        Roots and nodes that are already gone are left alone.
        """
        while node.parent is not None:
            parent = node.parent
            if len(node.children) > 1:
                return
            if node.children:
                self._merge_down(node)
                return
            held = node.held_bytes()
            if held:
                self.text_bytes -= len(node.text) - held
                node.text = node.text[:held]
                if len(parent.children) == 1:
                    self._merge_down(parent)
                return
            parent.disown(node)
            self.text_bytes -= len(node.text)
            self.node_count -= 1
            node = parent

    def _merge_down(self, node: Node) -> None:
        """Let the only child swallow `node`, if both fit into one edge."""
        (child,) = node.children.values()
        parent = node.parent
        size = len(node.text)
        if parent is None or size + len(child.text) > self.max_edge:
            return
        child.text = node.text + child.text
        for lane in child.lanes:
            lane.shift(size)
        for lane in node.lanes:
            lane.node = child
        child.lanes = node.lanes + child.lanes
        parent.adopt(child)
        node.parent = None
        node.children = NO_CHILDREN
        node.lanes = ()
        self.node_count -= 1
        self._merge_spans(node, child, size)
        if self._sweeping:
            self._sweeping.append(child)
        if len(child.lanes) > 1:
            self._join_lanes(child)

    def _merge_spans(self, node: Node, child: Node, size: int) -> None:
        """Give the spans of `node` to `child`, whose text now begins with its `size` bytes."""
        if node.spans is None and child.spans is None:
            return
        spans = {bit: (lo + size, hi + size, t) for bit, (lo, hi, t) in (child.spans or {}).items()}
        for bit, span in (node.spans or {}).items():
            spans[bit] = join_spans(spans.get(bit), span)
        child.spans = spans
        node.spans = None
        self._moved(node, child)

    def _join_lanes(self, node: Node) -> None:
        """Join lanes of one node that continue each other. O(lanes²), where nearly all nodes have one."""
        lanes = list(node.lanes)
        joined = False
        for front in lanes:
            if not front.ends:
                continue
            for back in lanes:
                if (
                    back.ends
                    and back is not front
                    and back.width == front.width
                    and back.base == front.base + len(front) * front.width
                    and back.chain[:8] == front.chain[-8:]
                    and front.last_end() <= back.end(0)
                    and disjoint(front, back.chain[8:], back)
                ):
                    front.append(back.chain[8:], back.ends, back.sets)
                    self._point(front)
                    back.ends = b""
                    joined = True
        if joined:
            node.lanes = tuple(lane for lane in lanes if lane.ends)


def _ignore_move(old: Node, new: Node) -> None:
    pass
