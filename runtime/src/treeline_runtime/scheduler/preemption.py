"""Which running requests give way to a more urgent one: decisions on plain values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from treeline_runtime.core import Req
from treeline_runtime.scheduler.decode import retraction_order


def candidates(req: Req, running: Iterable[Req], *, threshold: int, starvation_bound: float) -> list[Req]:
    """Who may be retracted for `req`: whose priority is lower by more than `threshold`; least urgent first, then who
    loses least. Who waited too long once is left alone: it would wait again."""
    return retraction_order(
        [other for other in running if req.priority - other.priority > threshold and other.waited_s < starvation_bound]
    )


def fewest(among: list[Req], enough: Callable[[list[Req]], bool]) -> list[Req]:
    """The shortest beginning of `among` that is enough, as longer ones are then; [] if not even all of them are."""
    if not among or not enough(among):
        return []
    return among[: bisect_left(range(len(among)), True, key=lambda count: enough(among[:count]))]
