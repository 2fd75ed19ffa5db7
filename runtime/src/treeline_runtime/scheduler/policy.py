"""In which order waiting requests are considered: pure functions of who waits and what is cached.

No policy starves anybody: whoever has waited longer than a bound comes before all others (`in_order`), so a stream of
requests that a policy prefers delays another one by the bound, and then by those that have waited as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


Policy = Callable[[list[Req], View], list[Req]]
"""(waiting: retracted requests, then the others as they came; a view) → the same requests in order of admission."""


def _first_come_first_served(waiting: list[Req], _: View) -> list[Req]:
    return waiting


def _longest_prefix_match(waiting: list[Req], view: View) -> list[Req]:
    if len(waiting) > MATCH_LIMIT:
        return waiting
    return sorted(waiting, key=lambda req: -view.match(req).num_pages)


def _depth_first_by_weight(waiting: list[Req], view: View) -> list[Req]:
    """Through the tree of cached prefixes, children before parents, those first below which most requests wait: each
    prefix is used by all who want it before it can be evicted. SGLang's `dfs-weight`; ties go to who came first."""
    if len(waiting) > MATCH_LIMIT:
        return waiting
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


def _random(waiting: list[Req], view: View) -> list[Req]:
    """Everyone draws a lot on arrival, so the order of two stays what it is."""
    return sorted(waiting, key=lambda req: _lot(view.seed, req.arrival))


def _by_priority(waiting: list[Req], _: View) -> list[Req]:
    return sorted(waiting, key=lambda req: -req.priority)


SCHEDULE_POLICIES: Registry[Policy] = Registry(
    "schedule policy",
    {
        "fcfs": _first_come_first_served,
        "lpm": _longest_prefix_match,
        "dfs-weight": _depth_first_by_weight,
        "random": _random,
        "priority": _by_priority,
    },
)


def in_order(policy: Policy, waiting: Iterable[Req], view: View, *, now: float, starvation_bound: float) -> list[Req]:
    """Who has waited `starvation_bound` seconds or more, oldest first; then the others as the policy has it."""
    overdue: list[Req] = []
    others: list[Req] = []
    for req in waiting:
        waited = req.waited_s + now - req.waiting_since
        (overdue if waited >= starvation_bound else others).append(req)
    overdue.sort(key=lambda req: req.arrival)
    return overdue + policy(others, view)


def _lot(seed: int, number: int) -> int:
    """64 bits that look random: the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
