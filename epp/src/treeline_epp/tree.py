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

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat

from msgspec import Struct

from treeline_epp.edges import Edges
from treeline_epp.lane import (
    KEY_MASK,
    Lane,
    common_prefix,
    disjoint,
    pack_ends,
    pack_hashes,
    same_hashes,
)
from treeline_epp.node import NO_CHILDREN, Node


class Tree(Edges):
    """Marks and spans of all namespaces of a model. `blocks` is shared by the namespaces: hashes are seeded with them.

    - changing: `store`, `remove`, `begin_sweep` and `sweep`, `lay`, `settle`, `prune_roots`
    - looking: `roots`, `held_by`, `nodes`, `check`; matching a key is in `matching`
    """

    # Events

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
        chain = pack_hashes((parent or 0, *hashes))  # no parent is a hash of 0
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
                same = same_hashes(lane.chain, 8 * first + 8, chain, 8 * done + 8) >> 3
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
            if lane is not None and lane is second and lane.slot(hashes[1]) < lane.slot(hashes[0]):
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
            same = same_hashes(lane.chain, 8 * slot + 8, packed, 8 * done) >> 3
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
                    slot = other.slot(block) if other is not None else 0
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
                there = other.slot(block)
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
        data = b"".join(pieces)
        if lane is not None and self._extend(lane, offset, data, run):
            return
        placed = 0

        def place(node: Node, start: int, stop: int, offset: int) -> None:
            """Data bytes start … stop−1 lie in `node` from `offset` on: put the blocks that end there."""
            nonlocal placed
            after = bisect_right(ends, stop, placed)
            if after > placed:
                self._place(node, run, placed, after, offset - start)
                placed = after

        self._walk(node, offset, data, place)

    def _extend(self, lane: Lane, offset: int, data: bytes, run: "_Run") -> bool:
        """Spare the walk where a run only makes a leaf with one lane longer, as the blocks of a decode do."""
        node = lane.node
        size = len(node.text)
        if (
            offset != size
            or size + len(data) > self.max_edge
            or node.children
            or len(node.lanes) > 1
            or lane.chain[-8:] != run.chain[:8]
            or lane.width != run.width
            or lane.has_holes()
        ):
            return False
        node.text += data
        self.text_bytes += len(data)
        lane.append(run.chain[8:], pack_ends(run.ends, size), run.bit)
        self.blocks.update(zip(run.keys, repeat(lane), strict=False))
        return True

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
                same = same_hashes(lane.chain, 8 * slot + 8, run.chain, 8 * first + 8) >> 3
                same = min(same, common_prefix(lane.ends, 2 * slot, ends, 0) >> 1)
                if not same:
                    continue
                self._mark(lane, slot, slot + same, run.bit, [])
                first, slot, ends = first + same, slot + same, ends[2 * same :]
            if first == stop:
                break
            packed = run.chain[8 * first + 8 : 8 * stop + 8]
            if slot == count and disjoint(lane, packed):
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


def _ignore_visit(node: Node, start: int, stop: int, offset: int) -> None:
    pass
