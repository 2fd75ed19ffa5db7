"""The load of an engine whose data-parallel ranks report one by one."""

from __future__ import annotations

from collections.abc import Collection

from treeline_wire.load import LoadStat


class RankLoads:
    """The last report of each rank, put together: counts add up, as the ranks work at the same time."""

    def __init__(self) -> None:
        self._last: dict[int, LoadStat] = {}

    def take(self, rank: int, load: LoadStat, ranks: Collection[int]) -> LoadStat | None:
        """The load of all ranks, `load` being the newest of `rank`; None until each of `ranks` has reported."""
        if len(ranks) <= 1:
            return load
        self._last[rank] = load
        known = [self._last[other] for other in ranks if other in self._last]
        return _together(known) if len(known) == len(ranks) else None


def _together(loads: list[LoadStat]) -> LoadStat:
    return LoadStat(
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_tokens=sum(load.num_tokens for load in loads),
        max_total_num_tokens=sum(load.max_total_num_tokens for load in loads),
        num_waiting_uncached_tokens=sum(load.num_waiting_uncached_tokens for load in loads),
        num_total_tokens=sum(load.num_total_tokens for load in loads),
        max_running_requests=sum(load.max_running_requests for load in loads),
        total_prefill_uncached_tokens=sum(load.total_prefill_uncached_tokens for load in loads),
        # Their busy times overlap: tokens of all by the time of one is the speed of the engine.
        total_prefill_busy_us=sum(load.total_prefill_busy_us for load in loads) // len(loads),
    )
