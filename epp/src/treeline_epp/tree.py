"""A radix tree over bytes whose edges carry marks: where blocks of an engine's cache end, and which pods hold them.

Theory of operation. An edge is a non-empty byte string of at most `max_edge` bytes, kept in the node below it; long
texts are chains of such nodes. A block of tokens is known by its hash and lies on the path that its text and its
ancestors' texts spell. Its *mark* is the byte at which it ends; marks of one hash chain inside one edge are packed in a
lane (see `lane`). `blocks` maps each held hash to its lane: a later event finds a block's place by hash alone, and
the text of a block that some pod already holds is never built again.

Hashes are trusted: within one tree (one model) equal hashes mean equal blocks, whichever pod sent them. Each namespace
(LoRA, salt) has a root of its own. A pod is one bit; sets of pods are ints. Trees know nothing of time, pods' names or
events: see `index`.

Invariants, all asserted by `check`:

- siblings differ in their first byte, which is their key in the parent's `children`;
- a node with one child could not swallow it: together they would exceed `max_edge` (split on divergence, merge on
  removal);
- a leaf's text ends with its last mark or span: nothing is kept that nobody holds;
- `blocks[h & KEY_MASK]` is lane L ⇔ L has a slot with hash h that some pod holds; of two hashes that differ in the
  high bits only, the second one is not stored;
- lanes neither begin nor end with a hole.

The tree also carries *spans*: parts of edges that a routed request will have put into a pod's cache (see `history`).
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat

from msgspec import Struct

from treeline_epp.lane import KEY_MASK, NO_PARENT, Lane, pack_ends, pack_hashes
from treeline_epp.node import NO_CHILDREN, Node, join_spans

#: Longest edge in bytes. Long enough that a match costs few steps, short enough that cutting an edge is cheap.
MAX_EDGE = 8192


class Tree:
    """Marks and spans of all namespaces of a model. `blocks` is shared by the namespaces: hashes are seeded with them.

    - changing: `store`, `remove`, `begin_sweep` and `sweep`, `lay`, `settle`, `prune_roots`
    - looking: `roots`, `held_by`, `nodes`, `check`; matching a key is in `matching`

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

    # Events

    def root(self, namespace: str | None) -> Node:
        """The root of a namespace, made on first use. O(1)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", None)
        return root

    def lane_of(self, block: int) -> Lane | None:
        """The lane of a block that some pod holds. O(lane)."""
        lane = self.blocks.get(block & KEY_MASK)
        return lane if lane is not None and _slot(lane, block) >= 0 else None

    def prune_roots(self) -> None:
        """Forget empty namespaces. O(namespaces)."""
        for namespace in [name for name, root in self.roots.items() if not root.children]:
            del self.roots[namespace]

    def store(
        self,
        root: Node,
        parent: int | None,
        hashes: Sequence[int],
        texts: Callable[[int, int], list[bytes] | None],
        width: int,
        bit: int,
    ) -> tuple[int, list[int]]:
        """The pod with `bit` now holds blocks `hashes`, a chain that begins below `parent` (None: at `root`).

        `texts(i, j)` gives the texts of blocks i … j−1; it is only asked for blocks that nobody holds. `width` is
        tokens per block. Returns how many blocks were stored, from the first on, and which of them the pod held
        already. It stops short where a text is needed but is None, where a prompt's first block has no byte of text,
        and where a hash has the key of another. Raises KeyError if nobody holds `parent` nor the first block,
        ValueError if a hash occurs twice or is its own ancestor; nothing is stored then.

        Complexity: known blocks cost one comparison per lane, new ones O(bytes) and one dict entry each.
        """
        blocks = self.blocks
        count = len(hashes)
        chain = (NO_PARENT if parent is None else pack_hashes((parent,))) + pack_hashes(hashes)
        keys = [block & KEY_MASK for block in hashes]
        distinct = set(keys)
        if len(distinct) != count or (parent is not None and parent & KEY_MASK in distinct):
            raise ValueError("not a chain")
        held_before: list[int] = []
        lane: Lane | None = None
        slot = -1
        if parent is not None and keys[0] not in blocks:
            lane = blocks.get(parent & KEY_MASK)
            slot = lane.find(chain[:8]) if lane is not None else -1
            if slot < 0:
                raise KeyError(parent)
        done = 0
        while done < count:
            known = blocks.get(keys[done])
            if known is not None:
                lane = known
                first = lane.find(chain[8 * done + 8 : 8 * done + 16])
                if first < 0:
                    break
                same = _same_hashes(lane.chain, 8 * first + 8, chain, 8 * done + 8) >> 3
                slot = first + same - 1
                self._mark(lane, first, slot + 1, bit, held_before)
                done += same
                continue
            stop = count if blocks.keys().isdisjoint(keys[done:] if done else keys) else done + 1
            while stop < count and keys[stop] not in blocks:
                stop += 1
            pieces = texts(done, stop)
            if pieces is None or (lane is None and not pieces[0]):
                break
            run = _Run(chain[8 * done : 8 * stop + 8], keys[done:stop], width, bit)
            self._insert(root, lane, slot, pieces, run)
            done = stop
            if done < count:
                lane = blocks[keys[done - 1]]
                slot = lane.find(chain[8 * done : 8 * done + 8])
        return done, held_before

    def remove(self, hashes: Sequence[int], bits: int) -> int:
        """The pod with `bits` no longer holds `hashes`. Returns how many of them it did not hold in the first place.

        Descendants stay (an engine may drop ancestors first). Runs in the order of their chain, or in the opposite one,
        cost one comparison per lane; others O(log) a block. Each touched edge costs O(edge).
        """
        blocks = self.blocks
        if len(hashes) > 1:
            lane, second = self.lane_of(hashes[0]), self.lane_of(hashes[1])
            if lane is not None and lane is second and _slot(lane, hashes[1]) < _slot(lane, hashes[0]):
                hashes = hashes[::-1]
        packed = pack_hashes(hashes)
        unknown = done = 0
        count = len(hashes)
        touched: dict[Node, None] = {}
        while done < count:
            lane = blocks.get(hashes[done] & KEY_MASK)
            slot = lane.find(packed[8 * done : 8 * done + 8]) if lane is not None else -1
            if lane is None or slot < 0:
                unknown += 1
                done += 1
                continue
            same = _same_hashes(lane.chain, 8 * slot + 8, packed, 8 * done) >> 3
            unknown += self._unmark(lane, slot, slot + same, bits, touched)
            done += same
        self._settle_all(touched)
        return unknown

    def begin_sweep(self) -> None:
        """Visit all nodes with `sweep` from now on, also those that other changes make meanwhile. O(nodes)."""
        self._sweeping = list(self.nodes())

    def sweep(self, bits: int, max_nodes: int) -> int:
        """Take pods out of the next nodes' marks and spans; nothing may be stored for these pods until the end.

        Returns the nodes left to visit. O(edges visited), plus one dict operation for each block that nobody holds
        afterwards.
        """
        nodes = self._sweeping
        for _ in range(min(max_nodes, len(nodes))):
            node = nodes.pop()
            if node.parent is None:
                continue
            touched: dict[Node, None] = {node: None}
            for lane in node.lanes:
                self._unmark(lane, 0, len(lane), bits, touched)
            if node.spans is not None:
                node.spans = {bit: span for bit, span in node.spans.items() if not bit & bits} or None
            self._settle_all(touched)
        return len(nodes)

    def lay(self, root: Node, key: bytes) -> None:
        """Make the path that spells `key`. The last edge may go on beyond it.

        The caller must put a span at the end of the path before anything else happens to the tree, or call `settle`
        on the last node. O(bytes).
        """
        self._walk(root, 0, key, _ignore_visit)

    # Looking

    def held_by(self, bit: int) -> set[int]:
        """All blocks that the pod with `bit` holds. O(tree)."""
        held: set[int] = set()
        for node in self.nodes():
            for lane in node.lanes:
                hashes = lane.hashes()
                for first, after, pods in lane.runs():
                    if pods & bit:
                        held.update(hashes[first:after])
        return held

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first. The tree must not change meanwhile."""
        stack = [node for root in self.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # Inside

    def _mark(self, lane: Lane, start: int, stop: int, bit: int, held_before: list[int]) -> None:
        """Add a pod to slots of a lane, filling holes."""
        for first, after, old, new in lane.paint(start, stop, bit, 0):
            if old == new:
                held_before.extend(lane.hashes()[first:after])
            elif not old:
                self._fill_holes(lane, first, after, bit, held_before)

    def _unmark(self, lane: Lane, start: int, stop: int, bits: int, touched: "dict[Node, None]") -> int:
        """Take a pod out of slots of a lane; returns how many of these blocks it did not hold.

        Nodes that must be settled afterwards are added to `touched`.
        """
        touched[lane.node] = None
        unknown = 0
        for first, after, old, new in lane.paint(start, stop, 0, bits):
            if not old:  # holes; the hash may live elsewhere
                for block in lane.hashes()[first:after]:
                    other = self.lane_of(block)
                    slot = _slot(other, block) if other is not None else 0
                    unknown += 1 if other is None else self._unmark(other, slot, slot + 1, bits, touched)
            elif old == new:
                unknown += after - first
            elif not new:
                for block in lane.hashes()[first:after]:
                    del self.blocks[block & KEY_MASK]
        return unknown

    def _fill_holes(self, lane: Lane, start: int, stop: int, bit: int, held_before: list[int]) -> None:
        """Holes were painted: enter them into `blocks`. A hash that lives elsewhere (a publisher contradicted another
        about its parent) stays a hole here and is marked there."""
        hashes = lane.hashes()
        for slot in range(start, stop):
            block = hashes[slot]
            other = self.blocks.setdefault(block & KEY_MASK, lane)
            if other is not lane:
                lane.paint(slot, slot + 1, 0, bit)
                there = _slot(other, block)
                if there >= 0:
                    self._mark(other, there, there + 1, bit, held_before)

    def _insert(self, root: Node, lane: Lane | None, slot: int, pieces: list[bytes], run: "_Run") -> None:
        """Put blocks with these texts, held by nobody yet, below slot `slot` of `lane` (None: below `root`).

        `run.base` and `run.ends` are found here.
        """
        node, offset = root, 0
        if lane is not None:
            node, offset = lane.node, lane.end(slot)
            run.base = lane.base + (slot + 1) * lane.width
        ends = run.ends = list(accumulate(map(len, pieces)))
        placed = 0

        def place(node: Node, start: int, stop: int, offset: int) -> None:
            """Data bytes start … stop−1 lie in `node` from `offset` on: put the blocks that end there."""
            nonlocal placed
            after = bisect_right(ends, stop, placed)
            if after > placed:
                self._place(node, run, placed, after, offset - start)
                placed = after

        self._walk(node, offset, b"".join(pieces), place)

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

    def _place(self, node: Node, run: "_Run", first: int, stop: int, delta: int) -> None:
        """Put blocks first … stop−1 of a run into a lane of `node`: fill its holes, lengthen it, or begin another.

        In the node's text they end `delta` bytes beyond where `run.ends` says.
        """
        ends = pack_ends(run.ends[first:stop], delta)
        for lane in node.lanes:
            ahead = run.base + first * run.width - lane.base
            if lane.width != run.width or ahead < 0 or ahead % run.width:
                continue
            slot = ahead // run.width
            count = len(lane)
            if slot > count or lane.chain[8 * slot : 8 * slot + 8] != run.chain[8 * first : 8 * first + 8]:
                continue
            if slot < count:  # are these the holes of the same blocks?
                same = _same_hashes(lane.chain, 8 * slot + 8, run.chain, 8 * first + 8) >> 3
                same = min(same, common_prefix(lane.ends, 2 * slot, ends, 0) >> 1)
                if not same:
                    continue
                self._mark(lane, slot, slot + same, run.bit, [])
                first, slot, ends = first + same, slot + same, ends[2 * same :]
            if first == stop:
                break
            packed = run.chain[8 * first + 8 : 8 * stop + 8]
            if slot == count and _disjoint(lane, packed):
                lane.append(packed, ends, run.bit)
                self.blocks.update(zip(run.keys[first:stop], repeat(lane), strict=False))
                break
        else:
            base, chain = run.base + first * run.width, run.chain[8 * first : 8 * stop + 8]
            lane = Lane(node, base, run.width, chain, ends, run.bit)
            node.lanes += (lane,)
            self.blocks.update(zip(run.keys[first:stop], repeat(lane), strict=False))
        if len(node.lanes) > 1:
            self._join_lanes(node)

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
                    and _disjoint(front, back.chain[8:], back)
                ):
                    front.append(back.chain[8:], back.ends, back.sets)
                    self._point(front)
                    back.ends = b""
                    joined = True
        if joined:
            node.lanes = tuple(lane for lane in lanes if lane.ends)

    def check(self) -> None:
        """Assert every invariant. O(tree)."""
        slots = 0
        text_bytes = node_count = 0
        for root in self.roots.values():
            assert not any((root.text, root.lanes, root.spans, root.parent))
        for node in [*self.roots.values(), *self.nodes()]:
            for key, child in node.children.items():
                assert child.parent is node
                assert child.text[0] == key
            if node.parent is None:
                continue
            text_bytes += len(node.text)
            node_count += 1
            assert 1 <= len(node.text) <= self.max_edge
            if not node.children:
                assert node.children is NO_CHILDREN
                assert node.held_bytes() == len(node.text), (node.held_bytes(), node.text)
            if len(node.children) == 1:
                (child,) = node.children.values()
                assert len(node.text) + len(child.text) > self.max_edge, (node.text, child.text)
            for lane in node.lanes:
                assert lane.node is node
                lane.check()
                slots += self._check_slots(lane)
            assert node.spans != {}
            for lo, hi, _ in (node.spans or {}).values():
                assert 0 <= lo < hi <= len(node.text)
        assert NO_CHILDREN == {}
        assert slots == len(self.blocks), (slots, len(self.blocks))
        assert (text_bytes, node_count) == (self.text_bytes, self.node_count)

    def _check_slots(self, lane: Lane) -> int:
        held = 0
        hashes = lane.hashes()
        assert len(set(hashes)) == len(hashes), "a hash twice in one lane"
        for first, after, pods in lane.runs():
            for slot in range(first, after):
                if pods:
                    assert self.blocks[hashes[slot] & KEY_MASK] is lane
                    held += 1
        return held


class _Run(Struct):
    """A chain of blocks that nobody holds yet, on its way into the tree.

    `chain` is the parent's hash and then each block's, `keys` what `blocks` knows them by; `base` counts the tokens
    before the first; `ends` are offsets in the text of the run.
    """

    chain: bytes
    keys: list[int]
    width: int
    bit: int
    base: int = 0
    ends: list[int] = []


def common_prefix(text: bytes, offset: int, data: bytes, at: int) -> int:
    """How many bytes `text` from `offset` and `data` from `at` have in common. O(bytes), in O(log) steps."""
    low, high = 0, min(len(text) - offset, len(data) - at)
    while low < high:
        middle = (low + high + 1) >> 1
        if data.startswith(text[offset + low : offset + middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low


def _slot(lane: Lane, block: int) -> int:
    return lane.find(block.to_bytes(8, "little"))


def _same_hashes(chain: bytes, offset: int, packed: bytes, at: int) -> int:
    """Bytes of whole hashes that `chain` from `offset` and `packed` from `at` have in common. O(bytes)."""
    size = min(len(chain) - offset, len(packed) - at)
    if chain[offset : offset + size] == packed[at : at + size]:
        return size
    return common_prefix(chain, offset, packed, at) & ~7


def _disjoint(lane: Lane, packed: bytes, other: Lane | None = None) -> bool:
    """Is none of these hashes in the lane already? They are held nowhere, or they are those of `other`.

    Only holes can make it so, where publishers contradict each other. O(1) for lanes without holes.
    """
    if not _has_holes(lane) and (other is None or not _has_holes(other)):
        return True
    return not set(lane.hashes()).intersection(struct.unpack(f"<{len(packed) >> 3}Q", packed))


def _has_holes(lane: Lane) -> bool:
    return isinstance(lane.sets, list) and not all(pods for _, _, pods in lane.runs())


def _ignore_move(old: Node, new: Node) -> None:
    pass


def _ignore_visit(node: Node, start: int, stop: int, offset: int) -> None:
    pass
