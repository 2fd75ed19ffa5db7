"""The index: which pod holds which prefix. Its input are events of engines and routed requests, its output matches.

Theory of operation. Endpoints that serve the same model share a *scope*; a scope is one `RadixTree`, a namespace (LoRA,
salt) a root in it. Trees know a pod as a bit. Bits are cheap, so all entries of a pod can change at once:

- an epoch change retires the pod's bit (matches forget it at once) and gives it a new one; retired bits are swept out
  of the trees in small steps by `tick`, and then reused;
- a snapshot fills a second bit while the first still counts, and replaces it when it is complete;
- after a gap that could not be covered, the old bit *ages*: it still counts and still takes removals, but ends after a
  while, and only blocks that are announced again survive.

Only events of the first full-attention group count, and blocks whose text is known (for the reasons see
`event_filter.Skip`). Engines may announce a hash twice and remove each copy on its own: `Pod.copies` counts them.

A tier below a pod's device (host memory, disk) has a bit of its own from its first event on, and what happens to all
entries of the pod happens to those of its tiers. If a scope has such pods, their keys are matched again with the blocks
of the tiers: a prefix may begin on the device and go on in host memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from treeline_wire.keys import PrefixKeys

from treeline_epp.index.event_filter import Skip, Tier, block_texts, namespace_of, skip_reason, tier_of
from treeline_epp.index.limits import LOWER_SHARE, SLICE, IndexLimits, weight
from treeline_epp.index.matching import Walk, match, uniting, walk
from treeline_epp.index.node import Node
from treeline_epp.index.orphans import Orphan
from treeline_epp.index.pods import Hit, Match, Pod, PodBits
from treeline_epp.index.predictions import foreseen
from treeline_epp.index.scope import Scope


class Index:
    """See the module.

    - pods: `add_pod`, `remove_pod`, `clear`, `age`; `respell` all of a scope
    - events: `apply`; `begin_snapshot`, `stage`, `end_snapshot`, `drop_snapshot`; `grafts` and `graft`
    - routing: `match`, `holders`, `predict`, `withdraw`, `cap_hit`, `request_rebuild`
    - upkeep: `tick`, `blocks_of`, `totals`, `check`

    `changed` are pods whose `blocks` may have changed, `new_adapters` pods whose events have named an adapter for the
    first time; the caller reads and clears both. `skipped` counts the skipped blocks of removed pods.
    """

    def __init__(self, limits: IndexLimits | None = None) -> None:
        self.limits = limits or IndexLimits()
        self._bits = PodBits()
        self._scopes: dict[str, Scope] = {}
        self.changed: set[Pod] = set()
        self.skipped: Counter[str] = Counter()
        self.new_adapters: set[Pod] = set()
        self._capped_pods: dict[Pod, None] = {}
        self._to_sweep: list[Scope] = []

    # Pods

    def add_pod(self, name: str, scope: str, row: int = -1) -> Pod:
        """Add a pod that holds nothing. Pods of one scope share blocks: same model, same tokenizer."""
        pod = Pod(name, scope, row)
        pod.bit = self._take_live_bit(pod)
        return pod

    def remove_pod(self, pod: Pod) -> None:
        """Forget a pod at once; its marks are swept later. The pod must not be used any more."""
        self._drop(pod)
        self.skipped.update(pod.skipped)
        self.new_adapters.discard(pod)

    def clear(self, pod: Pod) -> None:
        """Drop all entries of a pod: its cache was cleared, or a new process is behind it. O(copies); swept later."""
        self.drop_snapshot(pod)
        for bit, _ in pod.aged:
            self._retire(bit)
        self._retire(pod.bit)
        pod.bit = self._take_live_bit(pod)
        pod.aged.clear()
        for lower in pod.lower.values():
            self._drop(lower)
        pod.lower.clear()
        scope = self._scope(pod.scope)
        scope.aged.pop(pod, None)
        scope.tiered.pop(pod, None)
        pod.copies.clear()
        pod.hit_caps.clear()
        self._capped_pods.pop(pod, None)
        pod.blocks = 0
        self.changed.add(pod)
        pod.group = None

    def respell(self, name: str) -> None:
        """Drop all entries of a scope, because its pods' events will be read with other keys, or none. The known blocks
        are spelled by the old keys and would be found again by their hashes, so all of them go at once; the pods'
        subscriptions must start again. O(pods), and the tree's memory is freed.
        """
        for pod in {pod for pod in self._bits.owners.values() if pod.scope == name and pod.tier is None}:
            self.clear(pod)
            pod.precise = False
        if (old := self._scopes.pop(name, None)) is not None:
            new = self._scope(name)
            new.live, new.aged = old.live, old.aged

    def age(self, pod: Pod, now: float) -> None:
        """Handle lost removals: the pod's present blocks count for `aged_life_s` more, unless they are announced again.
        The number of copies of a block is unknown from now on: counting starts again with new announcements, and the
        next removal is taken for the last one.
        """
        pod.copies.clear()
        pod.aged.append((pod.bit, now + self.limits.aged_life_s))
        self._scope(pod.scope).aged[pod] = None
        pod.bit = self._take_live_bit(pod)
        for lower in pod.lower.values():
            self.age(lower, now)

    # Events

    def apply(self, pod: Pod, event: Event, keys: PrefixKeys | None) -> None:
        """Apply one event of a pod. Never raises: unusable blocks are counted in `pod.skipped`.

        Complexity: see `RadixTree.store` and `RadixTree.remove`; texts are made for new blocks only.
        """
        if type(event) is BlockStored:
            self._store(pod, event, keys, staged=False)
        elif type(event) is BlockRemoved:
            self._remove(pod, event)
        elif type(event) is AllBlocksCleared:
            self.clear(pod)

    def begin_snapshot(self, pod: Pod) -> None:
        """Begin a snapshot: the events of `stage` will replace all entries of the pod."""
        self.drop_snapshot(pod)
        self._begin_staging(pod)

    def stage(self, pod: Pod, event: Event, keys: PrefixKeys | None) -> None:
        """Add a part of the snapshot, parents first."""
        assert pod.staging
        if type(event) is BlockStored:
            self._store(pod, event, keys, staged=True)

    def end_snapshot(self, pod: Pod) -> None:
        """Complete the snapshot: from now on it is the pod's content."""
        staged, pod.staging = pod.staging, 0
        assert staged
        group = pod.group
        lower = {tier: pod.lower.pop(tier) for tier, one in list(pod.lower.items()) if one.staging}
        self.clear(pod)
        self._retire(pod.bit)
        pod.bit = staged
        scope = self._scope(pod.scope)
        scope.add(pod, staged)
        pod.group = group
        pod.blocks = pod.staged
        for tier, one in lower.items():
            self.end_snapshot(one)
            pod.lower[tier] = one
            scope.tiered[pod] = None

    def drop_snapshot(self, pod: Pod) -> None:
        """Give up an incomplete snapshot."""
        for one in (pod, *pod.lower.values()):
            if one.staging:
                self._retire(one.staging)
                one.staging = 0

    def grafts(self, pod: Pod) -> bool:
        """Return whether `graft` has work: parents of orphans in the pod's scope have come."""
        scope = self._scopes.get(pod.scope)
        return scope is not None and (scope.orphans.ready or bool(scope.gone))

    def graft(self, name: str, budget: int) -> None:
        """Place orphans of a scope whose parents have come, then the orphans that waited for these, and so on, until
        the budget is used up: each costs its `weight`.
        """
        scope = self._scope(name)
        while budget > 0 and (orphan := scope.orphans.take()) is not None:
            budget -= weight(orphan.event)
            pod = self._bits.owners.get(orphan.owner)
            if pod is None:
                continue
            self.changed.add(pod)
            stored = self._place(pod, orphan.owner, orphan.event, orphan.keys, scope, scope.tree.root(None))
            scope.orphans.place(orphan.event.block_hashes[:stored])
            if orphan.gone:
                scope.gone.append(orphan)
        while budget > 0 and scope.gone:  # only after their descendants have found their place
            orphan = scope.gone.popleft()
            budget -= weight(orphan.event)
            pod = self._bits.owners.get(orphan.owner)
            if pod is not None:
                victims = [block for block in orphan.gone if not pod.take_copy(block)]
                pod.blocks -= len(victims)
                scope.tree.remove(victims, orphan.owner)

    # Routing

    def match(self, scope: str, namespace: str | None, key: bytes, now: float) -> Match:
        """Return how much of `key` each pod of a scope holds. O(bytes matched) at memory speed."""
        known = self._scopes.get(scope)
        root = known.tree.roots.get(namespace) if known is not None else None
        if known is None or root is None:
            return Match()
        path = walk(root, key)
        if not path.nodes:
            return Match()
        unite = uniting([pod.bits for pod in known.aged]) if known.aged else None
        levels = foreseen(match(known.tree, path, known.live, unite), path, unite, now)
        found = Match(levels, {}, path.matched, known.lower(path) if known.tiered else {})
        return replace(found, special=self._capped(found, path, now)) if self._capped_pods else found

    def holders(self, pods: int) -> npt.NDArray[np.int32]:
        """Return the rows of the pods with these live bits. O(bits) at memory speed."""
        return self._bits.rows(pods)

    def predict(self, pod: Pod, namespace: str | None, key: bytes, hit: Hit, now: float) -> float:
        """Predict that `pod` will hold all of `key`, since a request with it goes there.

        `hit` is the match's result; only the part beyond its confirmed blocks is predicted. Returns the time at which
        the prediction ends, which names it for `withdraw`.
        """
        limits = self.limits
        life, budget = limits.eventless_life_s, limits.eventless_bytes
        if pod.precise:
            life, budget = limits.prediction_life_s, limits.prediction_bytes
        known = self._scope(pod.scope)
        if known.tree.text_bytes + len(key) <= limits.max_text_bytes:
            known.predictions.predict(known.tree, known.tree.root(namespace), key, hit.end, pod.bit, now, life, budget)
        return now + life

    def withdraw(self, pod: Pod, namespace: str | None, key: bytes, ends_at: float) -> None:
        """Drop a prediction whose request failed before its prefill."""
        known = self._scopes.get(pod.scope)
        root = known.tree.roots.get(namespace) if known is not None else None
        if known is not None and root is not None:
            known.predictions.withdraw(known.tree, root, key, pod.bit, ends_at)

    def request_rebuild(self, pod: Pod) -> None:
        """Ask for a rebuild: entries of this pod were wrong, and its subscriptions must build them again."""
        pod.rebuild_wanted = True

    def cap_hit(self, pod: Pod, namespace: str | None, key: bytes, tokens: int, now: float) -> None:
        """Cap the hits of a pod that held only `tokens` of a key that should have matched further: for a while no path
        through the first block beyond that gives it more. O(bytes matched) at memory speed.
        """
        known = self._scopes.get(pod.scope)
        root = known.tree.roots.get(namespace) if known is not None else None
        if root is None:
            return
        for node, _ in walk(root, key).nodes:
            if any(run.base + len(run) * run.width > tokens for run in node.runs):
                pod.hit_caps[node] = (tokens, now + self.limits.hit_cap_life_s)
                self._capped_pods[pod] = None
                return

    # Upkeep

    def tick(self, now: float, budget: int = 256) -> None:
        """Housekeeping in steps of about a millisecond: end predictions, hit caps and aged bits, graft orphans, sweep
        retired bits."""
        for name, scope in self._scopes.items():
            self.graft(name, SLICE)
            scope.predictions.expire(scope.tree, now)
            for pod in list(scope.aged):
                for bit, ends_at in [entry for entry in pod.aged if entry[1] <= now]:
                    pod.aged.remove((bit, ends_at))
                    self._retire(bit)
                if not pod.aged:
                    del scope.aged[pod]
        for pod in list(self._capped_pods):
            for node in [node for node, (_, ends_at) in pod.hit_caps.items() if ends_at <= now]:
                del pod.hit_caps[node]
            if not pod.hit_caps:
                del self._capped_pods[pod]
        self._sweep(budget)

    def blocks_of(self, pod: Pod) -> set[int]:
        """Return all blocks that a pod is known to hold on its device, or in a tier, orphans included. O(tree): for
        tests and the debug page.
        """
        scope = self._scopes.get(pod.scope)
        if scope is None:
            return set()
        bits = [pod.bit, *(bit for bit, _ in pod.aged)]
        held = (scope.tree.held_by(bit) | scope.orphans.held_by(bit) for bit in bits)
        return set(chain.from_iterable(held))

    def totals(self) -> dict[str, int]:
        """Return sizes, for metrics. O(scopes)."""
        scopes = self._scopes.values()
        return {
            "blocks": sum(len(scope.tree.blocks) for scope in scopes),
            "text_bytes": sum(scope.tree.text_bytes for scope in scopes),
            "nodes": sum(len(scope.tree.nodes) for scope in scopes),
            "namespaces": sum(len(scope.tree.roots) for scope in scopes),
            "orphan_blocks": sum(scope.orphans.blocks for scope in scopes),
            "orphan_blocks_dropped": sum(scope.orphans.dropped_blocks for scope in scopes),
        }

    def check(self) -> None:
        """Assert every invariant. O(index)."""
        for name, scope in self._scopes.items():
            scope.check({pod for pod in self._bits.owners.values() if pod.scope == name})
        self._bits.check()

    # Inside

    def _capped(self, plain: Match, path: Walk, now: float) -> dict[Pod, Hit]:
        """Return the reduced hits of pods in which audits have found less on this path."""
        held = {pod: plain.hit(pod) for pod in self._capped_pods}
        found = {pod: pod.capped(hit, path, now) for pod, hit in held.items()}
        return {pod: hit for pod, hit in found.items() if hit is not held[pod]}

    def _store(self, pod: Pod, event: BlockStored, keys: PrefixKeys | None, *, staged: bool) -> None:
        if not event.block_hashes or not self._counts(pod, event):
            return
        if event.lora_name is not None and pod.saw_adapter(event.lora_name):
            self.new_adapters.add(pod)
        scope = self._scope(pod.scope)
        tree = scope.tree
        hashes, parent = event.block_hashes, event.parent_block_hash
        tier = tier_of(event)
        if tier is not None:
            pod = self._tier(pod, tier)
        if staged and not pod.staging:
            self._begin_staging(pod)
        bit = pod.staging if staged else pod.bit
        namespace, plain = namespace_of(event)
        if not plain:
            keys = None
        root = tree.root(None)  # not used if the first block or its parent has a place already
        if parent is None and event.token_ids:
            root = tree.root(namespace)
            first = tree.run_of(hashes[0])
            if first is not None and first.node.root is not root and tier is None:
                pod.skipped[Skip.NAMESPACE] += len(hashes)
                return
        share = 1.0 if tier is None else LOWER_SHARE
        if max(tree.text_bytes / self.limits.max_text_bytes, len(tree.blocks) / self.limits.max_blocks) > share:
            pod.skipped[Skip.FULL] += len(hashes)
            return
        stored = self._place(pod, bit, event, keys, scope, root)
        if stored and scope.orphans and event.token_ids:
            scope.orphans.place(hashes[:stored])
            self.graft(pod.scope, SLICE)

    def _place(self, pod: Pod, bit: int, event: BlockStored, keys: PrefixKeys | None, scope: Scope, root: Node) -> int:
        """Store an event in the tree, or keep it as an orphan. Return how many of its blocks are in the tree."""
        hashes, tokens, width = event.block_hashes, event.token_ids, event.block_size
        tree, parent, count = scope.tree, event.parent_block_hash, len(hashes)
        if not tokens:  # vLLM announces blocks of lower tiers like this: their hashes may be known, in any order
            hashes, parent = [block for block in hashes if tree.run_of(block) is not None], None

        def texts(start: int, stop: int) -> list[bytes] | None:
            if keys is None or not width or len(tokens) != len(hashes) * width:
                return None
            wanted = tokens if stop - start == len(hashes) else tokens[start * width : stop * width]
            return block_texts(keys.token_bytes, wanted, width)

        no_text = Skip.NO_TEXT if event.extra_keys is None else Skip.EXTRA_KEYS
        crowded = tree.crowded
        try:
            stored, before = tree.store(root, parent, hashes, texts, width, bit)
        except ValueError:
            pod.skipped[Skip.HASHES] += len(hashes)
            return 0
        except KeyError:
            if keys is None:
                pod.skipped[no_text] += len(hashes)
            else:
                scope.orphans.add(Orphan(bit, event, keys))
            return 0
        if stored < count:
            pod.skipped[Skip.CROWDED if tree.crowded > crowded else no_text] += count - stored
        if not stored:
            return 0
        pod.block_size = width or pod.block_size
        if stored == count:
            pod.precise = True
        if bit == pod.staging:
            pod.staged += stored - len(before)
            return stored
        pod.blocks += stored - len(before)
        self.changed.add(pod)
        if before:
            pod.copies.update(before)
        if scope.predictions.size(bit):
            last = tree.run_of(hashes[stored - 1])
            if last is not None:
                scope.predictions.confirm(tree, last, bit)
        return stored

    def _remove(self, pod: Pod, event: BlockRemoved) -> None:
        if not self._counts(pod, event):
            return
        hashes: Sequence[int] = event.block_hashes
        if (tier := tier_of(event)) is not None:
            if tier not in pod.lower:
                pod.skipped[Skip.UNKNOWN_REMOVAL] += len(hashes)
                return
            pod = pod.lower[tier]
        left = event.remaining_copy_counts
        if left is not None and len(left) == len(hashes):
            hashes = [block for block, copies in zip(hashes, left, strict=True) if copies <= 0]
            for block in hashes:
                pod.copies.pop(block, None)
        elif pod.copies:
            hashes = [block for block in hashes if not pod.take_copy(block)]
        scope = self._scope(pod.scope)
        bits = pod.bits
        unknown = scope.tree.remove(hashes, bits)
        pod.blocks -= len(hashes) - unknown
        self.changed.add(pod)
        if unknown and scope.orphans:
            held = [pod.bit, *(bit for bit, _ in pod.aged)]
            unknown -= sum(scope.orphans.remove(held, block) for block in hashes)
        if unknown:
            pod.skipped[Skip.UNKNOWN_REMOVAL] += unknown

    def _counts(self, pod: Pod, event: BlockStored | BlockRemoved) -> bool:
        """Return whether an event is of the group that decides the prefix. Count it if not."""
        reason = skip_reason(event)
        if reason is None and event.group_idx is not None:
            if pod.group is None and type(event) is BlockStored:
                pod.group = event.group_idx
            if pod.group != event.group_idx:
                reason = Skip.GROUP
        if reason is not None:
            pod.skipped[reason] += len(event.block_hashes)
        return reason is None

    def _scope(self, name: str) -> Scope:
        scope = self._scopes.get(name)
        if scope is None:
            scope = self._scopes[name] = Scope.empty(self.limits)
        return scope

    def _tier(self, pod: Pod, tier: Tier) -> Pod:
        """Return the pod's tier, which gets its bit with its first event."""
        known = pod.lower.get(tier)
        if known is None:
            known = pod.lower[tier] = Pod(pod.name, pod.scope, pod.row, skipped=pod.skipped, tier=tier)
            known.bit = self._take_live_bit(known)
            self._scope(pod.scope).tiered[pod] = None
        return known

    def _drop(self, pod: Pod) -> None:
        """Drop a pod, or a tier of one, with its entries."""
        self.clear(pod)
        self._retire(pod.bit)
        pod.bit = 0
        self.changed.discard(pod)

    def _begin_staging(self, pod: Pod) -> None:
        pod.staging = self._bits.take(pod)
        pod.staged = 0

    def _take_live_bit(self, pod: Pod) -> int:
        """Return a new bit that counts in matches."""
        bit = self._bits.take(pod)
        self._scope(pod.scope).add(pod, bit)
        return bit

    def _retire(self, bit: int) -> None:
        pod = self._bits.retire(bit)
        scope = self._scopes.get(pod.scope)
        if scope is not None:
            scope.retire(bit)

    def _sweep(self, budget: int) -> None:
        """Do the next step of the present sweep, or begin one. Bits are free after a whole round."""
        bits = self._bits
        if not bits.sweeping:
            if not bits.begin_round():
                return
            self._to_sweep = list(self._scopes.values())
            for scope in self._to_sweep:
                scope.tree.begin_sweep()
                scope.gone = deque(orphan for orphan in scope.gone if not orphan.owner & bits.sweeping)
        while self._to_sweep:
            scope = self._to_sweep[-1]
            budget = scope.orphans.sweep(bits.sweeping, budget)
            if budget <= 0 or scope.tree.sweep(bits.sweeping, budget):
                return
            self._to_sweep.pop().tree.prune_roots()
        bits.end_round()
