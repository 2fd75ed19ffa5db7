"""The clock that leases and write deadlines are kept by."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds that never jump, and that pass while the machine sleeps: a lease runs out meanwhile too."""
    return time.clock_gettime(_CLOCK)
