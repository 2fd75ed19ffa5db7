"""What is done once, before the first request pays for it."""

from __future__ import annotations

import logging
import time

from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.memory import told_as_settings
from treeline_runtime.scheduler.resolve import Resolved

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
"""On a CPU, where nothing is compiled and a large model takes seconds for a long prompt."""


def warm_up(executor: Executor, limits: Resolved) -> None:
    """See `Executor.warm_up`. Raises ConfigError where a full step has no memory."""
    chunk = min(limits.chunked_prefill_size, limits.context_length)
    lengths = [1, chunk] if limits.device.type == "cuda" else [min(WARM_UP_TOKENS, chunk)]
    started = time.perf_counter()
    with told_as_settings(f"a step of {chunk} prompt tokens", limits.device):
        executor.warm_up(lengths)
    logger.info("warmed up with %s tokens: %.1f s", " and ".join(map(str, lengths)), time.perf_counter() - started)
