"""A radix tree over bytes. Its edges carry blocks of engines' caches, predictions, and the pods that hold them.

`epp/RADIX_TREE.md` is its theory of operation: an example, the reasons, the costs. In short: an edge is a
non-empty byte string of at most `max_edge` bytes, kept in the node below it. A block of tokens is known by its hash and
lies where its text ends; blocks of one hash chain inside one edge are packed in a `BlockRun`. A pod is one bit; sets of
pods are ints. The tree knows nothing of time, pods' names or events: see `index`.

Invariants, all asserted by `check`:

- siblings differ in their first byte, which is their key in the parent's `children`;
- a node with one child could not swallow it: together they would exceed `max_edge`;
- a leaf's text ends with its last block or prediction: text that no pod holds is dropped;
- `blocks[h & KEY_MASK]` is run R ⇔ R has a slot with hash h that some pod holds; of two hashes that differ in the
  high bits only, the second one is not stored;
- runs neither begin nor end with a hole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat

from msgspec import Struct

from treeline_epp.index.all_nodes import AllNodes
from treeline_epp.index.node import (
    KEY_MASK,
    NO_CHILDREN,
    BlockRun,
    Node,
    common_prefix,
    disjoint,
    end_of_unknown,
    pack_ends,
    pack_hashes,
    same_hashes,
)
from treeline_epp.index.ranges import Ranges

MAX_EDGE = 8192
"""Longest edge in bytes. Long enough that a match costs few steps, short enough that cutting an edge is cheap."""
_SWEPT_AS_ONE = 4


class RadixTree:
    """Blocks and predictions of all namespaces of a model, with a root for each namespace.

    - changing: `store`, `remove`, `begin_sweep` and `sweep`, `lay`, `compact`, `prune_roots`
    - looking: `roots`, `nodes`, `run_of`, `held_by`, `check`; matching a key is in `matching`

    `nodes` are all but the roots, in no order. `blocks` leads from a held hash to its run; namespaces share it, since
    hashes are seeded with them. Hashes are trusted: equal hashes of any pods mean equal blocks. `crowded` counts blocks
    for which an edge had no room. `moved(old, new)` is called when predictions have moved to another node.
    """

    def __init__(self, max_edge: int = MAX_EDGE, moved: Callable[[Node, Node], None] = lambda _old, _new: None) -> None:
        assert 1 <= max_edge <= 0xFFFF
        self.max_edge = max_edge
        self.roots: dict[str | None, Node] = {}
        self.blocks: dict[int, BlockRun] = {}
        self.text_bytes = 0
        self.crowded = 0
        self._moved = moved
        self.nodes = AllNodes()

    # Lookups

    def root(self, namespace: str | None) -> Node:
        """Return the root of a namespace, made on first use. O(1)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", None)
        return root

    def prune_roots(self) -> None:
        """Drop empty namespaces. O(namespaces)."""
        for namespace in [name for name, root in self.roots.items() if not root.children]:
            del self.roots[namespace]

    def run_of(self, block: int) -> BlockRun | None:
        """Return the run of a block that some pod holds. O(run)."""
        run = self.blocks.get(block & KEY_MASK)
        return run if run is not None and run.slot(block) >= 0 else None

    def held_by(self, bit: int) -> set[int]:
        """Return all blocks that the pod with `bit` holds. O(tree)."""
        held: set[int] = set()
        for node in self.nodes:
            for run in node.runs:
                hashes = run.hashes()
                for first, after, pods in run.segments():
                    if pods & bit:
                        held.update(hashes[first:after])
        return held

    # Blocks

    def store(
        self,
        root: Node,
        parent: int | None,
        hashes: Sequence[int],
        texts: Callable[[int, int], list[bytes] | None],
        width: int,
        bit: int,
    ) -> tuple[int, list[int]]:
        """Store that the pod with `bit` holds blocks `hashes`, a chain that begins below `parent` (None: at `root`).

        `texts(i, j)` gives the texts of blocks i … j−1, which no pod holds. `width` is tokens per block. Returns how
        many blocks were stored, from the first on, and which of them the pod held already. It stops short where a text
        is needed but is None, where a prompt's first block has no byte of text, where a hash has the key of another,
        and where an edge has no room for another run. Raises KeyError if no pod holds `parent` or the first block,
        ValueError if a hash occurs twice or is its own ancestor; nothing is stored.

        Complexity: known blocks cost one comparison per run, new ones O(bytes) and one dict entry each.
        """
        blocks = self.blocks
        count = len(hashes)
        chain = pack_hashes((parent or 0, *hashes))  # no parent is a hash of 0
        keys = [block & KEY_MASK for block in hashes]
        distinct = set(keys)
        if len(distinct) != count or (parent is not None and parent & KEY_MASK in distinct):
            raise ValueError("not a chain")
        held_before: list[int] = []
        run: BlockRun | None = None
        slot = -1
        if parent is not None and keys[0] not in blocks:
            run = blocks.get(parent & KEY_MASK)
            slot = run.find(chain[:8]) if run is not None else -1
            if slot < 0:
                raise KeyError(parent)
        done = 0
        while done < count:
            if (known := blocks.get(keys[done])) is not None:
                run = known
                first = run.find(chain[8 * done + 8 : 8 * done + 16])
                if first < 0:
                    break
                same = same_hashes(run.chain, 8 * first + 8, chain, 8 * done + 8) >> 3
                slot = first + same - 1
                self._mark(run, first, slot + 1, bit, held_before)
                done += same
                continue
            stop = end_of_unknown(keys, done, blocks.keys())
            pieces = texts(done, stop)
            if pieces is None or (run is None and not pieces[0]):
                break
            new = _NewBlocks(chain[8 * done : 8 * stop + 8], keys[done:stop], width, bit)
            placed = self._insert(root, run, slot, pieces, new)
            done += placed
            if done < stop:
                self.crowded += stop - done
                break
            if done < count:
                run = blocks[keys[done - 1]]
                slot = run.find(chain[8 * done : 8 * done + 8])
        return done, held_before

    def remove(self, hashes: Sequence[int], bits: int) -> int:
        """Store that the pod with `bits` no longer holds `hashes`. Returns how many of them it did not hold in the
        first place.

        Descendants stay (an engine may drop ancestors first). Runs in the order of their chain, or in the opposite one,
        cost one comparison per run; others O(log) a block. Each touched edge costs O(edge).
        """
        blocks = self.blocks
        if len(hashes) > 1:
            run, second = self.run_of(hashes[0]), self.run_of(hashes[1])
            if run is not None and run is second and run.slot(hashes[1]) < run.slot(hashes[0]):
                hashes = hashes[::-1]
        packed = pack_hashes(hashes)
        unknown = done = 0
        count = len(hashes)
        touched: dict[Node, None] = {}
        while done < count:
            run = blocks.get(hashes[done] & KEY_MASK)
            slot = run.find(packed[8 * done : 8 * done + 8]) if run is not None else -1
            if run is None or slot < 0:
                unknown += 1
                done += 1
                continue
            same = same_hashes(run.chain, 8 * slot + 8, packed, 8 * done) >> 3
            unknown += self._unmark(run, slot, slot + same, bits, touched)
            done += same
        self._compact_all(touched)
        return unknown

    def begin_sweep(self) -> None:
        """Begin a round in which `sweep` visits all nodes, also as other changes alter them meanwhile. O(1)."""
        self.nodes.begin_round()

    def sweep(self, bits: int, budget: int) -> int:
        """Take pods out of the next nodes' blocks and predictions; nothing may be stored for these pods until the end.

        Returns the nodes left to visit. `budget` bounds the work: a node counts one, and so do `_SWEPT_AS_ONE` blocks
        that no pod holds afterwards; a run that is begun is completed.
        """
        blocks, nodes = self.blocks, self.nodes
        while nodes.ahead and budget > 0:
            node = nodes.next()
            budget -= 1
            touched: dict[Node, None] = {node: None}
            for run in node.runs:
                if budget < 0:  # the next visit soon finds which runs are done
                    nodes.visit_again(node)
                    break
                before = len(blocks)
                self._unmark(run, 0, len(run), bits, touched)
                budget -= (before - len(blocks)) // _SWEPT_AS_ONE
            if node.predicted is not None:
                kept = {bit: predicted for bit, predicted in node.predicted.items() if not bit & bits}
                node.predicted = Ranges(kept) or None
            self._compact_all(touched)
        return nodes.ahead

    def _mark(self, run: BlockRun, start: int, stop: int, bit: int, held_before: list[int]) -> None:
        """Add a pod to slots of a run, filling holes."""
        for first, after, old, new in run.paint(start, stop, bit, 0):
            if old == new:
                held_before.extend(run.hashes()[first:after])
            elif not old:
                self._fill_holes(run, first, after, bit, held_before)

    def _unmark(self, run: BlockRun, start: int, stop: int, bits: int, touched: dict[Node, None]) -> int:
        """Remove a pod from slots of a run; return how many of these blocks it did not hold.

        Nodes that must be compacted afterwards are added to `touched`.
        """
        touched[run.node] = None
        unknown = 0
        for first, after, old, new in run.paint(start, stop, 0, bits):
            if not old:  # holes; the hash may live elsewhere
                for block in run.hashes()[first:after]:
                    other = self.run_of(block)
                    slot = other.slot(block) if other is not None else 0
                    unknown += 1 if other is None else self._unmark(other, slot, slot + 1, bits, touched)
            elif old == new:
                unknown += after - first
            elif not new:
                for block in run.hashes()[first:after]:
                    del self.blocks[block & KEY_MASK]
        return unknown

    def _fill_holes(self, run: BlockRun, start: int, stop: int, bit: int, held_before: list[int]) -> None:
        """Enter painted holes into `blocks`. A hash that is held elsewhere (two publishers name different parents)
        stays a hole here and is marked there.
        """
        hashes = run.hashes()
        for slot in range(start, stop):
            block = hashes[slot]
            other = self.blocks.setdefault(block & KEY_MASK, run)
            if other is not run:
                run.paint(slot, slot + 1, 0, bit)
                there = other.slot(block)
                if there >= 0:
                    self._mark(other, there, there + 1, bit, held_before)

    def _insert(self, root: Node, run: BlockRun | None, slot: int, pieces: list[bytes], new: _NewBlocks) -> int:
        """Insert blocks with these texts, held by no pod yet, below slot `slot` of `run` (None: below `root`).

        Returns how many there was room for; `new.base` and `new.ends` are found here.
        """
        node, offset = root, 0
        if run is not None:
            node, offset = run.node, run.end(slot)
            new.base = run.base + (slot + 1) * run.width
        ends = new.ends = list(accumulate(map(len, pieces)))
        data = b"".join(pieces)
        placed, room, last = 0, True, node

        def place(node: Node, start: int, stop: int, offset: int) -> None:
            """Place the blocks that end in data bytes start … stop−1, which lie in `node` from `offset` on."""
            nonlocal placed, room, last
            last = node
            after = bisect_right(ends, stop, placed) if room else placed
            if after > placed:
                count = self._place(node, new, placed, after, offset - start)
                room = placed + count == after
                placed += count

        self._walk(node, offset, data, place)
        if not room:
            self.compact(last)  # its text was laid for blocks that found no room
        return placed

    def _place(self, node: Node, new: _NewBlocks, first: int, stop: int, delta: int) -> int:
        """Place blocks first … stop−1 of new blocks in a run of `node`: fill its holes, lengthen it, or begin another.

        Returns for how many of them there was room. In the node's text they end `delta` bytes after `new.ends`.
        """
        begin = first
        ends = pack_ends(new.ends[first:stop], delta)
        for run in node.runs:
            ahead = new.base + first * new.width - run.base
            if run.width != new.width or ahead < 0 or ahead % new.width:
                continue
            slot = ahead // new.width
            count = len(run)
            known = 8 if slot == count else 16  # bytes: the parent's hash, and that of the first block
            if slot > count or not run.chain.startswith(new.chain[8 * first : 8 * first + known], 8 * slot):
                continue
            if slot < count:  # are these the holes of the same blocks?
                same = same_hashes(run.chain, 8 * slot + 8, new.chain, 8 * first + 8) >> 3
                same = min(same, common_prefix(run.ends, 2 * slot, ends, 0) >> 1)
                if not same:
                    continue
                self._mark(run, slot, slot + same, new.bit, [])
                first, slot, ends = first + same, slot + same, ends[2 * same :]
            if first == stop:
                break
            packed = new.chain[8 * first + 8 : 8 * stop + 8]
            if slot == count and disjoint(run, packed):
                run.append(packed, ends, new.bit)
                self.blocks.update(zip(new.keys[first:stop], repeat(run), strict=False))
                break
        else:
            if not node.has_room(new.bit):
                return first - begin
            base, chain = new.base + first * new.width, new.chain[8 * first : 8 * stop + 8]
            run = BlockRun(node, base, new.width, chain, ends, new.bit)
            node.runs += (run,)
            self.blocks.update(zip(new.keys[first:stop], repeat(run), strict=False))
        for longer in node.join_runs() if len(node.runs) > 1 else ():
            self._point(longer)
        return stop - begin

    # The shape: edges are walked, cut, merged and dropped, and their blocks and ranges move along

    def lay(self, root: Node, key: bytes) -> None:
        """Make the path that spells `key`. The last edge may be longer.

        The caller must put a prediction at the end of the path before anything else happens to the tree, or call
        `compact` on the last node. O(bytes).
        """
        self._walk(root, 0, key, lambda _node, _start, _stop, _offset: None)

    def compact(self, node: Node) -> None:
        """Restore the invariants around a node that lost blocks or predictions, up to the root if need be.

        Roots and nodes that are already gone are left alone. O(edge) each.
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
            self.nodes.remove(node)
            node = parent

    def _compact_all(self, nodes: dict[Node, None]) -> None:
        for node in nodes:  # all before the first merge, which may move runs into a node not among these
            node.trim()
        for node in nodes:
            self.compact(node)

    def _walk(self, node: Node, offset: int, data: bytes, visit: Callable[[Node, int, int, int], None]) -> None:
        """Follow `data` down from byte `offset` of `node`, adding missing nodes, splitting where it diverges.

        `visit(node, start, stop, offset)` is called for every node, in order: bytes start … stop−1 of `data` lie in it
        from `offset` on. A later split may still merge the node into the next.
        """
        at, size = 0, len(data)
        while True:
            text = node.text
            room = len(text) - offset
            take = min(room, size - at)
            if take and not data.startswith(text[offset : offset + take] if offset or take < room else text, at):
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
                self.nodes.add(child)
            node, offset = child, 0

    def _split(self, node: Node, at: int, offset: int) -> tuple[Node, int]:
        """Cut the edge after `at` bytes and restore the invariants, except that the upper part lacks its second child.

        Returns the upper part and the position of byte `offset` of `node` in it. O(edge).
        """
        upper, heads = node.cut(at)
        self.nodes.add_part(upper, node)
        for run in heads:
            self._point(run)
        if node.predicted is not None or upper.predicted is not None:
            self._moved(node, upper)
        if len(node.children) == 1:
            self._merge_down(node)
        above = upper.parent
        if above is not None and len(above.children) == 1:
            before = len(upper.text)
            self._merge_down(above)
            offset += len(upper.text) - before
        return upper, offset

    def _merge_down(self, node: Node) -> None:
        """Merge `node` into its only child, if both fit into one edge."""
        (child,) = node.children.values()
        if node.parent is None or len(node.text) + len(child.text) > self.max_edge:
            return
        node.merge_into(child)
        self.nodes.remove(node, child)
        if child.predicted is not None:
            self._moved(node, child)
        if len(child.runs) > 1:
            for run in child.join_runs():
                self._point(run)

    def _point(self, run: BlockRun) -> None:
        """Make `blocks` point to `run` for its held slots."""
        hashes = run.hashes()
        for first, after, pods in run.segments():
            if pods:
                keys = [block & KEY_MASK for block in hashes[first:after]]
                self.blocks.update(zip(keys, repeat(run), strict=False))

    def check(self) -> None:
        """Assert every invariant. O(tree)."""
        slots = text_bytes = 0
        reached = list(self.roots.values())
        for node in reached:
            reached.extend(node.children.values())
        assert set(reached[len(self.roots) :]) == set(self.nodes)
        assert len(set(reached)) == len(self.roots) + len(self.nodes)
        for root in self.roots.values():
            assert not any((root.text, root.runs, root.predicted, root.parent))
            root.check(self.max_edge)
        for node in self.nodes:
            node.check(self.max_edge)
            text_bytes += len(node.text)
            slots += sum(run.check_known(self.blocks) for run in node.runs)
        assert NO_CHILDREN == {}
        assert slots == len(self.blocks), (slots, len(self.blocks))
        assert text_bytes == self.text_bytes


class _NewBlocks(Struct):
    """A chain of new blocks, held by no pod yet.

    `chain` is the parent's hash and then each block's, `keys` are their keys in `blocks`; `base` counts the tokens
    before the first; `ends` are offsets in the text of the new blocks.
    """

    chain: bytes
    keys: list[int]
    width: int
    bit: int
    base: int = 0
    ends: list[int] = []
