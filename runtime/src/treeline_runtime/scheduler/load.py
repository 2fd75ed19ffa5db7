"""What a scheduler says of its load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeline_runtime.messages import LoadUpdate

if TYPE_CHECKING:
    from treeline_runtime.scheduler.scheduler import Scheduler


def load_of(scheduler: Scheduler, running: int) -> LoadUpdate:
    """running: requests that are being computed. Those whose grammar is being compiled wait, too."""
    cache, stats, page_size = scheduler.cache, scheduler.stats, scheduler.config.page_size
    return LoadUpdate(
        running=running,
        waiting=len(scheduler.prefill.waiting) + len(scheduler.grammars.waiting),
        waiting_uncached_tokens=scheduler.prefill.uncached_tokens(),
        pages_used=cache.used_pages,
        pages_cached=cache.tree.evictable_pages,
        pages_total=cache.pool.num_pages,
        page_size=page_size,
        tokens_used=cache.used_pages * page_size,
        total_prefill_uncached_tokens=stats.total_prefill_tokens,
        total_prefill_busy_us=stats.total_prefill_busy_us,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_ms=stats.decode_step_ms,
        draining=scheduler.draining,
        max_running=scheduler.limits.max_running_requests,
        asleep=scheduler.residence.level,
    )
