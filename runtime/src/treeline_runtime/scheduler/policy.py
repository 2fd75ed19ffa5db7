"""In which order waiting requests are considered: pure functions of who waits and what is cached.

A policy orders the requests of one client; clients take turns (`WaitingOrder`). None starves anybody: who has waited
longer than a bound comes before all others of its client, so a stream of requests that a policy prefers delays another
one by the bound, and then by those that have waited as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treeline_runtime.core import Req
from treeline_runtime.kvcache import Match, Node
from treeline_runtime.registry import Registry

MATCH_LIMIT = 128
"""Matching every waiting request is linear in the queue: beyond this, first come first served."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at besides the requests themselves."""

    match: Callable[[Req], Match]
    """What the cache could supply now."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """By itself, first come first served; retracted requests come before the others."""

    rank: Callable[[Req, View], int] = lambda _req, _view: 0
    """The smallest is first; it may not change while the request waits."""
    reorder: Callable[[list[Req], View], list[Req]] | None = None
    """(who waits, as ranked; a view) → the same requests in order of admission. Asked in each step, of short queues."""


def _longest_prefix_match(waiting: list[Req], view: View) -> list[Req]:
    return sorted(waiting, key=lambda req: -view.match(req).num_pages)


def _depth_first_by_weight(waiting: list[Req], view: View) -> list[Req]:
    """Through the tree of cached prefixes, children before parents, those first below which most requests wait: each
    prefix is used by all who want it before it can be evicted. SGLang's `dfs-weight`; ties go to who came first."""
    ending: dict[Node | None, list[Req]] = {}
    below: dict[Node | None, dict[Node, None]] = {}  # None: above the roots of all namespaces
    weight: dict[Node, int] = {}
    for req in waiting:
        node = view.match(req).node
        ending.setdefault(node, []).append(req)
        while node is not None:
            weight[node] = weight.get(node, 0) + 1
            below.setdefault(node.parent, {})[node] = None
            node = node.parent
    order: list[Req] = []
    stack: list[tuple[Node | None, bool]] = [(None, False)]
    while stack:
        node, entered = stack.pop()
        if entered:
            order += ending.get(node, ())
            continue
        stack.append((node, True))
        heaviest_first = sorted(below.get(node, {}), key=lambda child: -weight[child])
        stack += [(child, False) for child in reversed(heaviest_first)]
    return order


SCHEDULE_POLICIES: Registry[Policy] = Registry(
    "schedule policy",
    {
        "fcfs": Policy(),
        "lpm": Policy(reorder=_longest_prefix_match),
        "dfs-weight": Policy(reorder=_depth_first_by_weight),
        # everyone draws a lot on arrival, so the order of two stays what it is
        "random": Policy(rank=lambda req, view: _lot(view.seed, req.arrival)),
        "priority": Policy(rank=lambda req, _: -req.priority),
    },
)


def _lot(seed: int, number: int) -> int:
    """64 bits that look random: the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
