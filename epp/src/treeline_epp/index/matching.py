"""Matching a key against a tree: how much of it each pod holds.

A pod's hit is the longest run of blocks from the beginning of the prompt, each the parent of the next, all held by the
pod, whose text the key begins with. Its tokens are a guess, though: the tree knows texts, and the engine will split the
key's text in its own way. A block only counts if its chain *proves* that the engine splits there: blocks after it in
the same hash chain (whichever pods hold them), or the prediction that led to them, match for GUARD_BYTES more. Any
other text that matches as far proves nothing: `yours fairness x` in one pod's cache does not make another pod's `your`
a part of it, since the one chain was never split there. An engine always computes a prompt's last token, so a key that
ends with a block loses no tokens by this rule that the engine would have used.

The walk compares whole edges at memory speed; only then are blocks looked at, one run per edge in the common case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from msgspec import Struct

from treeline_epp.index.node import NO_PARENT, BlockRun, Node, common_prefix
from treeline_epp.index.radix_tree import RadixTree
from treeline_epp.index.ranges import PredictedRange

GUARD_BYTES = 8
"""Bytes after a block's end that must match, too."""
_NODES_BESIDE = 8
"""Most nodes that leave a path in one place and are searched for a chain's next block. Where a prompt forks into
thousands, nearly all of them have one; a miss costs a hit its last block."""
_RUNS_BESIDE = 256
"""The same for runs, in the general case: in an edge there may be one for each pod."""


class Level(Struct, frozen=True, gc=False):
    """The pods (bits) that hold exactly `tokens` proved tokens of the key, which are `end` bytes of its text. `held`
    are the matched bytes that they hold, unproved ones included; 0 if no more than `end`. `reach` are the bytes that
    they will hold if predictions come true; 0 without predictions beyond `end`.
    """

    pods: int
    tokens: int
    end: int
    held: int = 0
    reach: int = 0


class Walk(Struct, frozen=True):
    """The path of a key: its nodes with the key offset where each begins, and how many bytes of the key matched."""

    nodes: list[tuple[Node, int]]
    matched: int


def walk(root: Node, key: bytes) -> Walk:
    """Follow `key` down as far as it matches. Changes nothing. O(bytes matched) at memory speed."""
    node = root
    at, size = 0, len(key)
    nodes: list[tuple[Node, int]] = []
    while at < size:
        child = node.children.get(key[at])
        if child is None:
            break
        nodes.append((child, at))
        if not key.startswith(child.text, at):
            at += common_prefix(child.text, 0, key, at)
            break
        at += len(child.text)
        node = child
    return Walk(nodes, at)


Unite: TypeAlias = Callable[[int], int]
_REMEMBERED = 256
"""Sets of pods that a `Unite` remembers: few differ on a path, and a thousand unions take a tenth of a millisecond."""


def uniting(unions: Sequence[int]) -> Unite:
    """Return a function that adds to a set of bits all bits of each union that has one of them. A union are bits that
    stand for one pod: holding a block with any of them is holding it with all.
    """

    def unite(members: int) -> int:
        for union in unions:
            if members & union:
                members |= union
        return members

    return lru_cache(_REMEMBERED)(unite)


def match(tree: RadixTree, path: Walk, pods: int, unite: Unite | None = None) -> list[Level]:
    """Return how much of a walked key each of `pods` holds; pods that hold nothing are in a level of 0 tokens.

    `unite` is for pods with several bits. Levels are disjoint, longest first. O(nodes + segments), plus O(runs ×
    segments) in edges with several runs.
    """
    limit = path.matched - GUARD_BYTES
    levels: list[Level] = []
    tail, tokens, end, alive = NO_PARENT, 0, 0, pods
    last = -1
    for step, (node, start) in enumerate(path.nodes):
        runs = node.runs
        if not runs:
            continue
        run = runs[0]
        if len(runs) > 1 or run.chain[:8] != tail or run.base != tokens:
            return _match_chains(tree, path, pods, unite, levels, step, _Prefix(tail, tokens, end, alive))
        last = step
        whole = start + len(node.text) <= limit
        sets = run.sets
        if isinstance(sets, int):
            count = len(run.ends) >> 1 if whole else run.count_until(limit - start)
            held = alive & (unite(sets) if unite else sets) if count else alive
            if held != alive:
                levels.append(Level(alive & ~held, tokens, end))
                alive = held  # go on even if it is empty: another chain may begin at the root and end further down
        else:
            count = len(run.ends) >> 1 if whole else run.count_until(limit - start)
            for first, _, members in run.segments():
                if first >= count:
                    break
                held = alive & (unite(members) if unite else members)
                if held != alive:
                    at = start + run.end(first - 1) if first else end
                    levels.append(Level(alive & ~held, tokens + first * run.width, at))
                    alive = held
        if count:
            tokens += run.width * count
            end = start + run.end(count - 1)
        if not whole:
            break
        tail = run.chain[-8:]
    levels.append(Level(alive, tokens, end))
    if end and end > path.nodes[last][1] + path.nodes[last][0].runs[0].last_end() - GUARD_BYTES:
        proved = _extent(path, last) - GUARD_BYTES  # the blocks themselves do not prove their last edge
        if end > proved:
            levels = _proved(levels, path, last, proved)
    levels.reverse()
    return [level for level in levels if level.pods]


def _extent(path: Walk, step: int) -> int:
    """Return how many bytes of the key the chain with the one run of node `step` is known to match."""
    node, start = path.nodes[step]
    run = node.runs[0]
    end = start + run.last_end()
    for at in range(step + 1, len(path.nodes)):
        if end >= path.matched:
            break
        node, start = path.nodes[at]
        for after in node.runs:
            if after.chain[:8] == run.chain[-8:]:
                run, end, step = after, start + after.last_end(), at
                break
    if end >= path.matched:
        return path.matched
    tail = run.chain[-8:]
    for beside, extent in _runs_beside(path, step, end + GUARD_BYTES):
        if beside.chain[:8] == tail:
            return extent
    return max(end, _predicted_from(path, end))


def _runs_beside(path: Walk, step: int, least: int) -> Iterator[tuple[BlockRun, int]]:
    """Yield runs of the first nodes that leave the path at node `step` or after it, each with the bytes of the key that
    their texts match: most first, and no fewer than `least`.
    """
    below: Node | None = None
    for at in range(len(path.nodes) - 1, step - 1, -1):
        node, start = path.nodes[at]
        extent = min(start + len(node.text), path.matched)
        if extent < least:
            return
        left = _NODES_BESIDE
        for child in node.children.values():
            while child is not below and left:
                left -= 1
                for run in child.runs:
                    yield run, extent
                if child.runs or not child.children:
                    break
                child = next(iter(child.children.values()))
            if not left:
                break
        below = node


def _predicted_from(path: Walk, begin: int) -> int:
    """Return the byte of the key up to which a predicted range from byte `begin` on matches; 0 if none does.

    A range begins at a known token edge: the end of the pod's proved blocks when it was sent that text, or the end of
    blocks that came later, and so from that very text (`Predictions.confirm`).
    """
    before: Mapping[int, PredictedRange] = {}
    size = 0
    for node, start in path.nodes:
        if begin < start + len(node.text):
            low = begin - start
            for bit, known in (node.predicted or {}).items():
                if known[0] == low and (low or bit not in before or before[bit][1] < size):
                    return min(start + known[1], path.matched)
            return 0
        before, size = node.predicted or {}, len(node.text)
    return 0


def _proved(levels: Sequence[Level], path: Walk, step: int, proved: int) -> list[Level]:
    """Return the levels of a chain with one run in each edge up to node `step`, proved up to a byte."""
    tokens = end = 0
    for node, start in reversed(path.nodes[: step + 1]):
        count = node.runs[0].count_until(proved - start) if node.runs else 0
        if count:
            run = node.runs[0]
            tokens, end = run.base + count * run.width, start + run.end(count - 1)
            break
    return [level if level.end <= end else Level(level.pods, tokens, end, level.end) for level in levels]


def _match_chains(
    tree: RadixTree,
    path: Walk,
    pods: int,
    unite: Unite | None,
    levels: list[Level],
    step: int,
    prefix: _Prefix,
) -> list[Level]:
    """Match the general case from node `step` of the path on; `prefix` and `levels` are the results so far."""
    chains = _Chains(tree, path, pods, unite, prefix, step)
    if chains.follow():
        chains.prove()
        levels.append(Level(prefix.pods, prefix.tokens, prefix.end))
        proved = chains.prefix_extent - GUARD_BYTES
        if prefix.end > proved:
            levels = _proved(levels, path, step - 1, proved)
        return _longest([*levels, *chains.levels(levels[-1])])
    whole = Level(pods, 0, 0)
    chains = _Chains(tree, path, pods, unite, _Prefix(NO_PARENT, 0, 0, pods), 0)
    chains.follow()
    chains.prove()
    return _longest([whole, *chains.levels(whole)])


class _Prefix(Struct):
    """Blocks from the beginning of the prompt to `block` (its hash), and the pods that hold them all."""

    block: bytes
    tokens: int
    end: int
    pods: int


class _Seen(Struct):
    """A run on the path: where its edge begins in the key, the pods that hold everything before it, and its parent: a
    slot of the run `above`, or None (the beginning, the prefix, a block that no pod holds). `proved` is the number of
    its proved slots, `extent` the bytes of the key that its chain matches from there on.
    """

    start: int
    alive: int
    above: BlockRun | None = None
    slot: int = -1
    proved: int = 0
    extent: int = 0


class _Chains:
    """The general case: several runs in an edge, segments, chains that fork in the middle of an edge.

    Every run on the path continues for the pods that hold its parent block, and all before it (`follow`). Proofs go
    backwards from the runs' ends (`prove`): each run proves its own blocks and its ancestors'. `levels` are the results
    for pods: a pod may be in several, and the longest counts. `prefix` is the part that the caller has followed.
    """

    def __init__(self, tree: RadixTree, path: Walk, pods: int, unite: Unite | None, prefix: _Prefix, step: int) -> None:
        self.prefix = prefix
        self._step = step
        self.prefix_extent = prefix.end
        self._run_of = tree.run_of
        self._path = path
        self._limit = path.matched - GUARD_BYTES
        self._pods = pods
        self._unite = unite
        self._seen: dict[BlockRun, _Seen] = {}
        self._claims: list[tuple[BlockRun, int, int]] = []
        self._on_prefix: set[BlockRun] = set()

    def follow(self) -> bool:
        """Follow all runs from node `step` on. False if one forks from an earlier node: begin at the first one then."""
        for node, start in self._path.nodes[self._step :]:
            runs = node.runs
            for run in runs if len(runs) == 1 else sorted(runs, key=attrgetter("base")):
                seen = self._see(run, start)
                if seen is None:
                    return False
                self._seen[run] = seen
                if seen.alive:
                    self._claim(run, seen)
        return True

    def _see(self, run: BlockRun, start: int) -> _Seen | None:
        """Return a run with the pods that hold everything before it; None if the nodes followed do not show it."""
        if not run.base:
            return _Seen(start, self._pods)
        parent = run.chain[:8]
        if parent == self.prefix.block and run.base == self.prefix.tokens:
            self._on_prefix.add(run)
            return _Seen(start, self.prefix.pods)
        above = self._run_of(int.from_bytes(parent, "little"))
        if above is None:
            return _Seen(start, 0)  # no pod holds the parent
        known = self._seen.get(above)
        if known is None:
            return None if self.prefix.tokens else _Seen(start, 0)
        slot = above.find(parent)
        alive = known.alive
        if known.start + above.end(slot) > self._limit:
            alive = 0
        for first, _, members in above.segments():
            if first > slot or not alive:
                break
            alive &= self._unite(members) if self._unite else members
        return _Seen(start, alive, above, slot)

    def _claim(self, run: BlockRun, seen: _Seen) -> None:
        count = run.count_until(self._limit - seen.start)
        alive = seen.alive
        for first, after, members in run.segments():
            alive &= self._unite(members) if self._unite else members
            if not alive or first >= count:
                return
            self._claims.append((run, min(after, count), alive))

    def prove(self) -> None:
        """Find the proved slots: their chain continues, on the path or below it, for GUARD_BYTES more."""
        matched = self._path.matched
        for run, extent in islice(_runs_beside(self._path, self._step, 0), _RUNS_BESIDE):
            parent = run.chain[:8]
            if parent == self.prefix.block and run.base == self.prefix.tokens:
                self.prefix_extent = max(self.prefix_extent, extent)
            above = self._run_of(int.from_bytes(parent, "little")) if run.base else None
            seen = self._seen.get(above) if above is not None else None
            if above is not None and seen is not None:
                _prove_until(above, seen, above.find(parent), extent)
        for run, seen in reversed(self._seen.items()):
            end = seen.start + run.last_end()
            if end < matched and seen.extent < end + GUARD_BYTES:
                end = max(end, _predicted_from(self._path, end))
            _prove_until(run, seen, len(run) - 1, min(end, matched))
            if seen.above is not None:
                _prove_until(seen.above, self._seen[seen.above], seen.slot, seen.extent)
            elif run in self._on_prefix:
                self.prefix_extent = max(self.prefix_extent, seen.extent)
        self.prefix_extent = max(self.prefix_extent, _predicted_from(self._path, self.prefix.end))

    def levels(self, prefix: Level) -> list[Level]:
        """Return the pods' levels beyond `prefix`, which is the proved part of the prefix."""
        levels: list[Level] = []
        for run, count, pods in self._claims:
            held = self._seen[run].start + run.end(count - 1)
            above: BlockRun | None = run
            while above is not None:
                seen = self._seen[above]
                run, count = above, min(count, seen.proved)
                if count:
                    end = seen.start + run.end(count - 1)
                    levels.append(Level(pods, run.base + count * run.width, end, held))
                    break
                above, count = seen.above, seen.slot + 1
            else:
                tokens, end = (prefix.tokens, prefix.end) if run in self._on_prefix else (0, 0)
                levels.append(Level(pods, tokens, end, held))
        return levels


def _prove_until(run: BlockRun, seen: _Seen, slot: int, extent: int) -> None:
    """Record that the chain continues after `slot`, and matches the key to byte `extent`."""
    seen.extent = max(seen.extent, extent)
    seen.proved = max(seen.proved, min(slot + 1, run.count_until(extent - GUARD_BYTES - seen.start)))


def _longest(levels: list[Level]) -> list[Level]:
    """Return each pod in its longest level only; longest first."""
    out: list[Level] = []
    taken = 0
    for level in sorted(levels, key=lambda level: (-level.tokens, level.end, -level.held)):
        pods = level.pods & ~taken
        if pods:
            out.append(level if pods == level.pods else Level(pods, level.tokens, level.end, level.held))
            taken |= pods
    return out
