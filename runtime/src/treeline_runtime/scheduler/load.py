"""What a scheduler says of its load."""

from __future__ import annotations

from treeline_runtime.messages import LoadUpdate
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.prefill import PrefillManager
from treeline_runtime.scheduler.stats import SchedulerStats


def load_of(
    cache: CacheManager,
    prefill: PrefillManager,
    stats: SchedulerStats,
    *,
    running: int,
    max_running: int,
    compiling: int,
    draining: bool,
    asleep: int,
) -> LoadUpdate:
    """running: requests that are being computed, compiling: those whose grammar is; these wait, too. asleep: the level
    of sleep."""
    page_size = cache.page_size
    return LoadUpdate(
        running=running,
        waiting=len(prefill.waiting) + compiling,
        waiting_uncached_tokens=prefill.uncached_tokens(),
        pages_used=cache.used_pages,
        pages_cached=cache.tree.evictable_pages,
        pages_total=cache.pool.num_pages,
        page_size=page_size,
        tokens_used=cache.used_pages * page_size,
        total_prefill_uncached_tokens=stats.total_prefill_tokens,
        total_prefill_busy_us=stats.total_prefill_busy_us,
        total_jumps=stats.total_jumps,
        total_forced_tokens=stats.total_forced_tokens,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_ms=stats.decode_step_ms,
        draining=draining,
        max_running=max_running,
        asleep=asleep,
    )
