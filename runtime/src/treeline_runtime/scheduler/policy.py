"""In which order waiting requests are considered."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treeline_runtime.core import Req
from treeline_runtime.registry import Registry

MATCH_LIMIT = 128
"""Matching every waiting request is linear in the queue: beyond this, first come first served."""
OVERTAKEN_LIMIT = 32
"""A request that this many later ones passed goes first."""

Policy = Callable[[list[Req], Callable[[Req], int]], list[Req]]
"""(waiting in order of arrival, cached tokens of a request) → order of admission."""


def _first_come_first_served(waiting: list[Req], _: Callable[[Req], int]) -> list[Req]:
    return waiting


def _longest_prefix_match(waiting: list[Req], cached_tokens: Callable[[Req], int]) -> list[Req]:
    if len(waiting) > MATCH_LIMIT:
        return waiting
    overdue = [req for req in waiting if req.overtaken >= OVERTAKEN_LIMIT]
    others = [req for req in waiting if req.overtaken < OVERTAKEN_LIMIT]
    return overdue + sorted(others, key=lambda req: -cached_tokens(req))


SCHEDULE_POLICIES: Registry[Policy] = Registry(
    "schedule policy", {"fcfs": _first_come_first_served, "lpm": _longest_prefix_match}
)


def note_overtaking(admitted: Req, waiting: Iterable[Req]) -> None:
    """`waiting` in order of the queue: retracted requests, which are older, then the others as they came."""
    for req in waiting:
        if req.arrival > admitted.arrival:
            break
        req.overtaken += 1
