"""The index: which pod holds which prefix. Events of publishers and routing history go in, matches come out.

Theory of operation. Endpoints that serve the same model share a *scope*; a scope is one `Tree`, a namespace (LoRA,
salt) a root in it. A pod is known to the trees as a bit. Bits are cheap, so what a pod holds can change as a whole:

- an epoch change retires the pod's bit (matches forget it at once) and gives it a new one; retired bits are swept out
  of the trees in small steps by `tick`, and then used again;
- a snapshot fills a second bit while the first goes on to answer, and takes its place when it is complete;
- after a gap that could not be covered, the old bit *ages*: it still counts and still takes removals, but ends after a
  while, and only what is announced again survives.

Which events count (see `announced.Skip` for the reasons why others do not): the first full-attention group of the
device tier, blocks whose text is known. Engines may announce a hash twice and remove each copy on its own:
`Pod.copies` counts.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from treeline_wire.keys import PrefixKeys

from treeline_epp.announced import Skip, block_texts, namespace_of, skip_reason
from treeline_epp.edges import MAX_EDGE
from treeline_epp.history import History, reach
from treeline_epp.matching import GUARD_BYTES, Level, Walk, match, walk
from treeline_epp.node import Node
from treeline_epp.orphans import OrphanRun, Orphans
from treeline_epp.tree import Tree


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of memory. Text is stored once, however many pods hold it; a block costs about 100 bytes beyond it.

    A prediction lives `predicted_life_s`, for pods without events `history_life_s`; `*_bytes` bound a pod's
    predictions. `aged_life_s` is how long blocks count after a gap that could not be covered.
    """

    max_text_bytes: int = 4 << 30
    max_blocks: int = 16_000_000
    max_orphan_blocks: int = 65_536
    predicted_life_s: float = 10.0
    predicted_bytes: int = 64 << 20
    history_life_s: float = 600.0
    history_bytes: int = 64 << 20
    aged_life_s: float = 120.0
    doubt_life_s: float = 30.0
    max_edge: int = MAX_EDGE


@dataclass(eq=False, slots=True)
class Pod:
    """One publisher's place in the index. Fields are the index's own; readers may look at them.

    `precise`: its events are in the tree, so predictions only bridge the time until events arrive. `blocks` counts
    held blocks. `block_size` is that of its newest event, 0 before the first.
    """

    name: str
    scope: str
    bit: int = 0
    staging: int = 0
    precise: bool = False
    blocks: int = 0
    block_size: int = 0
    group: int | None = None
    aged: list[tuple[int, float]] = field(default_factory=list)
    copies: Counter[int] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    doubts: dict[Node, tuple[int, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Everything that it is known to hold."""
        bits = self.bit
        for aged, _ in self.aged:
            bits |= aged
        return bits


class Hit(Struct, frozen=True, gc=False):
    """What a pod holds of a key: `tokens` confirmed by events, that is `end` bytes; predictions go to `reach` ≥ end."""

    tokens: int = 0
    end: int = 0
    reach: int = 0


NO_HIT = Hit()


class Match(Struct, frozen=True):
    """The result of `Index.match`: hits by pod, for pods that hold anything, and the bytes that the tree knows."""

    hits: dict[Pod, Hit]
    matched: int = 0

    def hit(self, pod: Pod) -> Hit:
        """What `pod` holds; zeros if nothing."""
        return self.hits.get(pod, NO_HIT)


@dataclass(eq=False, slots=True)
class _Scope:
    tree: Tree
    history: History
    orphans: Orphans


class Index:
    """See the module.

    - pods: `add_pod`, `remove_pod`, `clear`, `age`
    - events: `apply`; `begin_snapshot`, `apply_snapshot`, `end_snapshot`, `drop_snapshot`
    - routing: `match`, `predict`, `withdraw`, `doubt`
    - upkeep: `tick`, `blocks_of`, `totals`, `check`
    """

    def __init__(self, limits: IndexLimits | None = None) -> None:
        self.limits = limits or IndexLimits()
        self.pods: dict[int, Pod] = {}
        self._scopes: dict[str, _Scope] = {}
        self._free: list[int] = []
        self._slots = 0
        self._doubting = False
        self._retired = 0
        self._sweeping = 0
        self._to_sweep: list[Tree] = []

    # Pods

    def add_pod(self, name: str, scope: str) -> Pod:
        """A new pod, holding nothing. Pods of one scope share blocks: same model, same tokenizer."""
        pod = Pod(name, scope)
        pod.bit = self._take_bit(pod)
        return pod

    def remove_pod(self, pod: Pod) -> None:
        """Forget a pod at once; its marks are swept later. The pod must not be used any more."""
        self.clear(pod)
        self._retire(pod.bit)
        pod.bit = 0

    def clear(self, pod: Pod) -> None:
        """The pod holds nothing: its cache was cleared, or a new process is behind it. O(orphans); swept later."""
        self.drop_snapshot(pod)
        for bit, _ in pod.aged:
            self._retire(bit)
        self._retire(pod.bit)
        pod.bit = self._take_bit(pod)
        pod.aged.clear()
        pod.copies.clear()
        pod.doubts.clear()
        pod.blocks = 0
        pod.group = None

    def age(self, pod: Pod, now: float) -> None:
        """Removals were lost: what the pod holds now counts for `aged_life_s` more, unless it is announced again."""
        pod.aged.append((pod.bit, now + self.limits.aged_life_s))
        pod.bit = self._take_bit(pod)

    # Events

    def apply(self, pod: Pod, event: Event, keys: PrefixKeys | None) -> None:
        """Apply one event of a pod. Never raises: what cannot be used is counted in `pod.skipped`.

        Complexity: see `Tree.store` and `Tree.remove`; texts are made for new blocks only.
        """
        if type(event) is BlockStored:
            self._store(pod, pod.bit, event, keys)
        elif type(event) is BlockRemoved:
            self._remove(pod, event)
        elif type(event) is AllBlocksCleared:
            self.clear(pod)

    def begin_snapshot(self, pod: Pod) -> None:
        """What follows in `apply_snapshot` will replace all that the pod holds."""
        self.drop_snapshot(pod)
        pod.staging = self._take_bit(pod)

    def apply_snapshot(self, pod: Pod, events: Iterable[BlockStored], keys: PrefixKeys | None) -> None:
        """A part of the snapshot, parents first."""
        assert pod.staging
        for event in events:
            self._store(pod, pod.staging, event, keys)

    def end_snapshot(self, pod: Pod) -> None:
        """The snapshot is complete: from now on it is what the pod holds."""
        staged, pod.staging = pod.staging, 0
        assert staged
        group = pod.group
        self.clear(pod)
        self._retire(pod.bit)
        pod.bit = staged
        pod.group = group
        pod.blocks = len(self.blocks_of(pod))

    def drop_snapshot(self, pod: Pod) -> None:
        """Give up a snapshot that did not come to its end."""
        if pod.staging:
            self._retire(pod.staging)
            pod.staging = 0

    # Routing

    def match(self, scope: str, namespace: str | None, key: bytes, pods: Sequence[Pod], now: float) -> Match:
        """What each of `pods` (all of that scope) holds of `key`. O(bytes matched) at memory speed."""
        known = self._scopes.get(scope)
        root = known.tree.roots.get(namespace) if known is not None else None
        if known is None or root is None:
            return Match({})
        path = walk(root, key)
        if not path.nodes:
            return Match({})
        everyone = 0
        unions: list[int] = []
        for pod in pods:
            everyone |= pod.bit
            if pod.aged:
                unions.append(pod.bits)
                everyone |= unions[-1]
        levels = match(known.tree, path, everyone, unions)
        return Match(self._hits(path, levels, everyone, now), path.matched)

    def predict(self, pod: Pod, namespace: str | None, key: bytes, hit: Hit, now: float) -> float:
        """A request with `key` goes to `pod`: it will hold all of the key.

        `hit` is what the match said; only what lies beyond its confirmed part is predicted. Returns the time at which
        the prediction ends, which names it for `withdraw`.
        """
        limits = self.limits
        life, budget = limits.history_life_s, limits.history_bytes
        if pod.precise:
            life, budget = limits.predicted_life_s, limits.predicted_bytes
        known = self._scope(pod.scope)
        if known.tree.text_bytes + len(key) <= limits.max_text_bytes:
            known.history.predict(
                known.tree, known.tree.root(namespace), key, hit.end, pod.bit, now, life, budget
            )
        return now + life

    def withdraw(self, pod: Pod, namespace: str | None, key: bytes, ends_at: float) -> None:
        """The request that led to a prediction failed before its prefill."""
        known = self._scopes.get(pod.scope)
        root = known.tree.roots.get(namespace) if known is not None else None
        if known is not None and root is not None:
            known.history.withdraw(known.tree, root, key, pod.bit, ends_at)

    def doubt(self, pod: Pod, namespace: str | None, key: bytes, tokens: int, now: float) -> None:
        """The pod was found to hold only `tokens` of a key that should have matched further: for a while no path
        through the first block beyond that gives it more. O(bytes matched) at memory speed."""
        known = self._scopes.get(pod.scope)
        root = known.tree.roots.get(namespace) if known is not None else None
        if root is None:
            return
        for node, _ in walk(root, key).nodes:
            if any(lane.base + len(lane) * lane.width > tokens for lane in node.lanes):
                pod.doubts[node] = (tokens, now + self.limits.doubt_life_s)
                self._doubting = True
                return

    # Upkeep

    def tick(self, now: float, max_nodes: int = 256) -> None:
        """Housekeeping in steps of about a millisecond: end predictions, doubts and aged bits, sweep retired bits."""
        for scope in self._scopes.values():
            scope.history.expire(scope.tree, now)
        self._doubting = False
        for pod in {id(pod): pod for pod in self.pods.values()}.values():
            for bit, ends_at in [entry for entry in pod.aged if entry[1] <= now]:
                pod.aged.remove((bit, ends_at))
                self._retire(bit)
            for node in [node for node, (_, ends_at) in pod.doubts.items() if ends_at <= now]:
                del pod.doubts[node]
            self._doubting = self._doubting or bool(pod.doubts)
        self._sweep(max_nodes)

    def blocks_of(self, pod: Pod) -> set[int]:
        """All blocks that a pod is known to hold, orphans included. O(tree): for tests and the debug page."""
        scope = self._scopes.get(pod.scope)
        if scope is None:
            return set()
        bits = [pod.bit, *(bit for bit, _ in pod.aged)]
        held = (scope.tree.held_by(bit) | scope.orphans.held_by(bit) for bit in bits)
        return set(chain.from_iterable(held))

    def totals(self) -> dict[str, int]:
        """Sizes, for metrics. O(scopes)."""
        scopes = self._scopes.values()
        return {
            "blocks": sum(len(scope.tree.blocks) for scope in scopes),
            "text_bytes": sum(scope.tree.text_bytes for scope in scopes),
            "nodes": sum(scope.tree.node_count for scope in scopes),
            "namespaces": sum(len(scope.tree.roots) for scope in scopes),
            "orphan_blocks": sum(scope.orphans.blocks for scope in scopes),
            "orphan_blocks_dropped": sum(scope.orphans.dropped_blocks for scope in scopes),
        }

    def check(self) -> None:
        """Assert every invariant. O(index)."""
        for scope in self._scopes.values():
            scope.tree.check()
            scope.orphans.check()
        live = self._retired | self._sweeping
        for bit, pod in self.pods.items():
            assert bit in (pod.bit, pod.staging, *(aged for aged, _ in pod.aged))
            assert not live & bit
            live |= bit
        free = sum(1 << slot for slot in self._free)
        assert not live & free
        assert live | free == (1 << self._slots) - 1

    # Inside

    def _hits(self, path: Walk, levels: list[Level], everyone: int, now: float) -> dict[Pod, Hit]:
        hits: dict[Pod, Hit] = {}
        owners = self.pods
        for level in levels:
            if level.tokens:
                hit = Hit(level.tokens, level.end, level.end)
                for bit in _bits_of(level.pods):
                    hits[owners[bit]] = hit
        if any(node.spans for node, _ in path.nodes):
            ends = {bit: level.end for level in levels for bit in _bits_of(level.pods & everyone)}
            limit = path.matched - GUARD_BYTES
            for bit, end in reach(path.nodes, ends, now):
                pod = owners[bit]
                hit = hits.get(pod, NO_HIT)
                if min(end, limit) > hit.end:
                    hits[pod] = Hit(hit.tokens, hit.end, min(end, limit))
        if self._doubting:
            for pod, hit in hits.items():
                if pod.doubts:
                    hits[pod] = _doubted(pod, hit, path, now)
        return hits

    def _store(self, pod: Pod, bit: int, event: BlockStored, keys: PrefixKeys | None) -> None:
        hashes = event.block_hashes
        if not hashes or not self._counts(pod, event):
            return
        scope = self._scope(pod.scope)
        tree = scope.tree
        parent = event.parent_block_hash
        namespace, plain = namespace_of(event)
        if not plain:
            keys = None
        if parent is None:
            root = tree.root(namespace)
            first = tree.lane_of(hashes[0])
            if first is not None and _root_of(first.node) is not root:
                pod.skipped[Skip.NAMESPACE] += len(hashes)
                return
        else:
            root = tree.root(None)  # not used: the parent's place is known
        if tree.text_bytes > self.limits.max_text_bytes or len(tree.blocks) > self.limits.max_blocks:
            pod.skipped[Skip.FULL] += len(hashes)
            return
        stored = self._place(pod, bit, event, keys, scope, root)
        if stored and scope.orphans:
            self._graft(scope, hashes[:stored])

    def _place(
        self, pod: Pod, bit: int, event: BlockStored, keys: PrefixKeys | None, scope: _Scope, root: Node
    ) -> int:
        """Store an event in the tree, or keep it as an orphan. Returns how many of its blocks are in the tree."""
        hashes, tokens, width = event.block_hashes, event.token_ids, event.block_size
        tree = scope.tree

        def texts(start: int, stop: int) -> list[bytes] | None:
            if keys is None or not width or len(tokens) != len(hashes) * width:
                return None
            wanted = tokens if stop - start == len(hashes) else tokens[start * width : stop * width]
            return block_texts(keys.token_bytes, wanted, width)

        no_text = Skip.NO_TEXT if event.extra_keys is None else Skip.EXTRA_KEYS
        try:
            stored, before = tree.store(root, event.parent_block_hash, hashes, texts, width, bit)
        except ValueError:
            pod.skipped[Skip.HASHES] += len(hashes)
            return 0
        except KeyError:
            if keys is None:
                pod.skipped[no_text] += len(hashes)
            else:
                scope.orphans.add(OrphanRun(bit, event, keys))
            return 0
        if stored < len(hashes):
            pod.skipped[no_text] += len(hashes) - stored
        if bit == pod.staging or not stored:
            return stored
        pod.blocks += stored - len(before)
        if before:
            pod.copies.update(before)
        pod.block_size = width or pod.block_size
        if stored == len(hashes):
            pod.precise = True
        if scope.history.size(bit):
            last = tree.lane_of(hashes[stored - 1])
            if last is not None:
                scope.history.confirm(last, bit)
        return stored

    def _graft(self, scope: _Scope, blocks: Sequence[int]) -> None:
        """Place the orphans that waited for `blocks`, and those that waited for these, and so on."""
        ready = scope.orphans.take(blocks)
        gone: list[OrphanRun] = []
        while ready:
            run = ready.pop()
            pod = self.pods.get(run.owner)
            if pod is None:
                continue
            pod.blocks -= len(run.gone)
            stored = self._place(pod, run.owner, run.event, run.keys, scope, scope.tree.root(None))
            ready += scope.orphans.take(run.event.block_hashes[:stored])
            if run.gone:
                gone.append(run)
        for run in gone:  # only now, so that their descendants found their place
            scope.tree.remove(list(run.gone), run.owner)

    def _remove(self, pod: Pod, event: BlockRemoved) -> None:
        if not self._counts(pod, event):
            return
        hashes: Sequence[int] = event.block_hashes
        left = event.remaining_copy_counts
        if left is not None and len(left) == len(hashes):
            hashes = [block for block, copies in zip(hashes, left, strict=True) if copies <= 0]
            for block in hashes:
                pod.copies.pop(block, None)
        elif pod.copies:
            hashes = [block for block in hashes if not _take_copy(pod.copies, block)]
        scope = self._scope(pod.scope)
        bits = pod.bits
        unknown = scope.tree.remove(hashes, bits)
        pod.blocks -= len(hashes) - unknown
        if unknown and scope.orphans:
            held = [pod.bit, *(bit for bit, _ in pod.aged)]
            unknown -= sum(scope.orphans.remove(held, block) for block in hashes)
        if unknown:
            pod.skipped[Skip.UNKNOWN_REMOVAL] += unknown

    def _counts(self, pod: Pod, event: BlockStored | BlockRemoved) -> bool:
        """Is this an event of the device tier and of the group that decides the prefix? Counts it if not."""
        reason = skip_reason(event)
        if reason is None and event.group_idx is not None:
            if pod.group is None and type(event) is BlockStored:
                pod.group = event.group_idx
            if pod.group != event.group_idx:
                reason = Skip.GROUP
        if reason is not None:
            pod.skipped[reason] += len(event.block_hashes)
        return reason is None

    def _scope(self, name: str) -> _Scope:
        scope = self._scopes.get(name)
        if scope is None:
            history = History()
            tree = Tree(self.limits.max_edge, history.moved)
            scope = self._scopes[name] = _Scope(tree, history, Orphans(self.limits.max_orphan_blocks))
        return scope

    def _take_bit(self, pod: Pod) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._slots
            self._slots += 1
        self.pods[1 << slot] = pod
        return 1 << slot

    def _retire(self, bit: int) -> None:
        pod = self.pods.pop(bit)
        scope = self._scopes.get(pod.scope)
        if scope is not None:
            scope.history.forget(bit)
            scope.orphans.forget(bit)
        self._retired |= bit

    def _sweep(self, max_nodes: int) -> None:
        """The next step of the sweep that goes on, or the beginning of one. Bits are free after a whole round."""
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._to_sweep = [scope.tree for scope in self._scopes.values()]
            for tree in self._to_sweep:
                tree.begin_sweep()
        while self._to_sweep:
            if self._to_sweep[-1].sweep(self._sweeping, max_nodes):
                return
            self._to_sweep.pop().prune_roots()
        for slot in range(self._sweeping.bit_length()):
            if self._sweeping >> slot & 1:
                heapq.heappush(self._free, slot)
        self._sweeping = 0


def _bits_of(pods: int) -> list[int]:
    """The single bits of a set. O(pods in it)."""
    bits = []
    while pods:
        bit = pods & -pods
        bits.append(bit)
        pods ^= bit
    return bits


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _take_copy(copies: Counter[int], block: int) -> bool:
    """Remove one copy beyond the first; False if there is none."""
    left = copies.get(block, 0)
    if left > 1:
        copies[block] = left - 1
    elif left:
        del copies[block]
    return left > 0


def _doubted(pod: Pod, hit: Hit, path: Walk, now: float) -> Hit:
    """Cap a hit by what audits found on its path."""
    for node, start in path.nodes:
        doubt = pod.doubts.get(node)
        if doubt is not None and doubt[1] > now and hit.tokens > doubt[0]:
            end = min(hit.end, start)
            return Hit(doubt[0], end, end)
    return hit
