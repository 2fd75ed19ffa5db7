"""Matching a key against a tree: how much of it each pod holds.

A pod's hit is the longest run of blocks from the beginning of the prompt, each the parent of the next, all held by the
pod, whose text the key begins with. A block only counts if GUARD_BYTES more bytes of the key match beyond its end:
tokenizers may merge across a cut, so the tokens just before a divergence (or before the end of what is known) need not
be the ones that the engine will see. An engine always computes a prompt's last token, so a key that ends with a block
loses nothing by this that the engine would have used.

The walk compares whole edges at memory speed; only then are blocks looked at, one run per edge in the common case.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from treeline_epp.index.block_run import NO_PARENT, BlockRun, common_prefix
from treeline_epp.index.node import Node
from treeline_epp.index.radix_tree import RadixTree

GUARD_BYTES = 8
"""Bytes beyond a block's end that must match, too."""


class Level(Struct, frozen=True, gc=False):
    """These pods (bits) hold `tokens` tokens of the key, `end` bytes of its text, and no more."""

    pods: int
    tokens: int
    end: int


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


def match(tree: RadixTree, path: Walk, pods: int, unions: Sequence[int] = ()) -> list[Level]:
    """What each of `pods` holds of a walked key; pods that hold nothing are in a level of 0 tokens.

    `unions` are sets of bits that stand for one pod each: holding a block with any of them is holding it with all.
    Levels are disjoint, longest first. O(nodes + segments), plus O(runs × segments) in edges with several runs.
    """
    limit = path.matched - GUARD_BYTES
    levels: list[Level] = []
    tail, tokens, end, alive = NO_PARENT, 0, 0, pods
    for step, (node, start) in enumerate(path.nodes):
        runs = node.runs
        if not runs:
            continue
        run = runs[0]
        if len(runs) > 1 or run.chain[:8] != tail or run.base != tokens:
            return _match_chains(tree, path, pods, unions, levels, step, _Prefix(tail, tokens, end, alive))
        whole = start + len(node.text) <= limit
        sets = run.sets
        if isinstance(sets, int):
            count = len(run.ends) >> 1 if whole else run.count_until(limit - start)
            held = alive & (_unite(sets, unions) if unions else sets) if count else alive
            if held != alive:
                levels.append(Level(alive & ~held, tokens, end))
                alive = held  # go on even if it is empty: another chain may begin at the root and end further down
        else:
            count = len(run.ends) >> 1 if whole else run.count_until(limit - start)
            for first, _, members in run.segments():
                if first >= count:
                    break
                held = alive & _unite(members, unions)
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
    levels.reverse()
    return [level for level in levels if level.pods]


def _match_chains(
    tree: RadixTree,
    path: Walk,
    pods: int,
    unions: Sequence[int],
    levels: list[Level],
    step: int,
    prefix: _Prefix,
) -> list[Level]:
    """Go on from node `step` of the path in the general way; `prefix` and `levels` are what was found until there."""
    limit = path.matched - GUARD_BYTES
    chains = _Chains(tree, limit, pods, unions)
    chains.prefix = prefix
    if chains.follow(path.nodes[step:]):
        return _longest([*levels, Level(prefix.pods, prefix.tokens, prefix.end), *chains.levels])
    chains = _Chains(tree, limit, pods, unions)
    chains.follow(path.nodes)
    return _longest(chains.levels)


class _Prefix(Struct):
    """Blocks from the beginning of the prompt to `block` (its hash), and the pods that hold them all."""

    block: bytes
    tokens: int
    end: int
    pods: int


class _Chains:
    """The general case: several runs in an edge, segments, chains that fork in the middle of an edge.

    Every run on the path takes the pods that hold its parent block, and all before it, further. `levels` collects
    how far: pods occur in several, the longest counts. `prefix` is what the caller has already followed.
    """

    def __init__(self, tree: RadixTree, limit: int, pods: int, unions: Sequence[int]) -> None:
        self.prefix = _Prefix(NO_PARENT, 0, 0, pods)
        self.levels = [Level(pods, 0, 0)]
        self._run_of = tree.run_of
        self._limit = limit
        self._pods = pods
        self._unions = unions
        self._seen: dict[BlockRun, tuple[int, int]] = {}

    def follow(self, nodes: Sequence[tuple[Node, int]]) -> bool:
        """Follow all runs of these nodes. False: a run forks from a node before them, begin at the first node."""
        for node, start in nodes:
            runs = node.runs
            for run in runs if len(runs) == 1 else sorted(runs, key=_base):
                alive = self._alive_before(run)
                if alive is None:
                    return False
                if alive:
                    self._follow_run(run, start, alive)
        return True

    def _alive_before(self, run: BlockRun) -> int | None:
        """The pods that hold everything before a run; None if that cannot be told from the nodes followed."""
        if not run.base:
            return self._pods
        parent = run.chain[:8]
        if parent == self.prefix.block and run.base == self.prefix.tokens:
            return self.prefix.pods
        above = self._run_of(int.from_bytes(parent, "little"))
        if above is None:
            return 0  # nobody holds the parent
        seen = self._seen.get(above)
        if seen is None:
            return None if self.prefix.tokens else 0
        start, alive = seen
        slot = above.find(parent)
        if start + above.end(slot) > self._limit:
            return 0
        for first, _, members in above.segments():
            if first > slot:
                break
            alive &= _unite(members, self._unions)
        return alive

    def _follow_run(self, run: BlockRun, start: int, alive: int) -> None:
        self._seen[run] = (start, alive)
        count = run.count_until(self._limit - start)
        for first, after, members in run.segments():
            alive &= _unite(members, self._unions)
            if not alive or first >= count:
                return
            last = min(after, count)
            self.levels.append(Level(alive, run.base + last * run.width, start + run.end(last - 1)))


def _base(run: BlockRun) -> int:
    return run.base


def _unite(members: int, unions: Sequence[int]) -> int:
    """Complete each union that `members` touches."""
    for union in unions:
        if members & union:
            members |= union
    return members


def _longest(levels: list[Level]) -> list[Level]:
    """Each pod in its longest level only; longest first."""
    out: list[Level] = []
    taken = 0
    for level in sorted(levels, key=lambda level: (-level.tokens, level.end)):
        pods = level.pods & ~taken
        if pods:
            out.append(level if pods == level.pods else Level(pods, level.tokens, level.end))
            taken |= pods
    return out
