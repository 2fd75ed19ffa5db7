"""Matching a key against a tree: how much of it each pod holds.

A pod's hit is the longest run of blocks from the beginning of the prompt, each the parent of the next, all held by the
pod, whose text the key begins with. A block only counts if GUARD_BYTES more bytes of the key match beyond its end:
tokenizers may merge across a cut, so the tokens just before a divergence (or before the end of what is known) need not
be the ones that the engine will see. An engine always computes a prompt's last token, so a key that ends with a block
loses nothing by this that the engine would have used.

The walk compares whole edges at memory speed; only then are marks looked at, one lane per edge in the common case.
"""

from collections.abc import Sequence

from msgspec import Struct

from treeline_epp.lane import NO_PARENT, Lane, common_prefix
from treeline_epp.node import Node
from treeline_epp.tree import Tree

#: Bytes beyond a block's end that must match, too.
GUARD_BYTES = 8


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


def match(tree: Tree, path: Walk, pods: int, unions: Sequence[int] = ()) -> list[Level]:
    """What each of `pods` holds of a walked key; pods that hold nothing are in a level of 0 tokens.

    `unions` are sets of bits that stand for one pod each: holding a block with any of them is holding it with all.
    Levels are disjoint, longest first. O(nodes + runs), plus O(lanes × runs) in edges with several lanes.
    """
    limit = path.matched - GUARD_BYTES
    levels: list[Level] = []
    tail, tokens, end, alive = NO_PARENT, 0, 0, pods
    for step, (node, start) in enumerate(path.nodes):
        lanes = node.lanes
        if not lanes:
            continue
        lane = lanes[0]
        if len(lanes) > 1 or lane.chain[:8] != tail or lane.base != tokens:
            return _match_chains(tree, path, pods, unions, levels, step, _Run(tail, tokens, end, alive))
        whole = start + len(node.text) <= limit
        sets = lane.sets
        if isinstance(sets, int):
            count = len(lane.ends) >> 1 if whole else lane.count_until(limit - start)
            held = alive & (_unite(sets, unions) if unions else sets) if count else alive
            if held != alive:
                levels.append(Level(alive & ~held, tokens, end))
                alive = held  # go on even if it is empty: another chain may begin at the root and end further down
        else:
            count = len(lane.ends) >> 1 if whole else lane.count_until(limit - start)
            for first, _, members in lane.runs():
                if first >= count:
                    break
                held = alive & _unite(members, unions)
                if held != alive:
                    at = start + lane.end(first - 1) if first else end
                    levels.append(Level(alive & ~held, tokens + first * lane.width, at))
                    alive = held
        if count:
            tokens += lane.width * count
            end = start + lane.end(count - 1)
        if not whole:
            break
        tail = lane.chain[-8:]
    levels.append(Level(alive, tokens, end))
    levels.reverse()
    return [level for level in levels if level.pods]


def _match_chains(
    tree: Tree, path: Walk, pods: int, unions: Sequence[int], levels: list[Level], step: int, run: "_Run"
) -> list[Level]:
    """Go on from node `step` of the path in the general way; `run` and `levels` are what was found until there."""
    limit = path.matched - GUARD_BYTES
    chains = _Chains(tree, limit, pods, unions)
    chains.run = run
    if chains.follow(path.nodes[step:]):
        return _longest([*levels, Level(run.pods, run.tokens, run.end), *chains.levels])
    chains = _Chains(tree, limit, pods, unions)
    chains.follow(path.nodes)
    return _longest(chains.levels)


class _Run(Struct):
    """Blocks from the beginning of the prompt to `block` (its hash), and the pods that hold them all."""

    block: bytes
    tokens: int
    end: int
    pods: int


class _Chains:
    """The general case: several lanes in an edge, runs that differ, chains that fork in the middle of an edge.

    Every lane on the path takes the pods that hold its parent block, and all before it, further. `levels` collects
    how far: pods occur in several, the longest counts. `run` is what the caller has already followed.
    """

    def __init__(self, tree: Tree, limit: int, pods: int, unions: Sequence[int]) -> None:
        self.run = _Run(NO_PARENT, 0, 0, pods)
        self.levels = [Level(pods, 0, 0)]
        self._lane_of = tree.lane_of
        self._limit = limit
        self._pods = pods
        self._unions = unions
        self._seen: dict[Lane, tuple[int, int]] = {}

    def follow(self, nodes: Sequence[tuple[Node, int]]) -> bool:
        """Follow all lanes of these nodes. False: a lane forks from a node before them, begin at the first node."""
        for node, start in nodes:
            lanes = node.lanes
            for lane in lanes if len(lanes) == 1 else sorted(lanes, key=_base):
                alive = self._alive_before(lane)
                if alive is None:
                    return False
                if alive:
                    self._follow_lane(lane, start, alive)
        return True

    def _alive_before(self, lane: Lane) -> int | None:
        """The pods that hold everything before a lane; None if that cannot be told from the nodes followed."""
        if not lane.base:
            return self._pods
        parent = lane.chain[:8]
        if parent == self.run.block and lane.base == self.run.tokens:
            return self.run.pods
        above = self._lane_of(int.from_bytes(parent, "little"))
        if above is None:
            return 0  # nobody holds the parent
        seen = self._seen.get(above)
        if seen is None:
            return None if self.run.tokens else 0
        start, alive = seen
        slot = above.find(parent)
        if start + above.end(slot) > self._limit:
            return 0
        for first, _, members in above.runs():
            if first > slot:
                break
            alive &= _unite(members, self._unions)
        return alive

    def _follow_lane(self, lane: Lane, start: int, alive: int) -> None:
        self._seen[lane] = (start, alive)
        count = lane.count_until(self._limit - start)
        for first, after, members in lane.runs():
            alive &= _unite(members, self._unions)
            if not alive or first >= count:
                return
            last = min(after, count)
            self.levels.append(Level(alive, lane.base + last * lane.width, start + lane.end(last - 1)))


def _base(lane: Lane) -> int:
    return lane.base


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
