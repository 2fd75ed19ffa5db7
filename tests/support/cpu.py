"""Bounds on processor time that hold on every machine: multiples of the time for a fixed piece of work on this one."""

from __future__ import annotations

import json
import time

_DATA = json.dumps([{"name": str(number), "values": [number, str(number)]} for number in range(3000)])


def reference_s() -> float:
    """Return the seconds of processor time of this thread for a fixed piece of work: some 10 ms on a core of 2023.
    Measure it in the same test as the time that is compared with it. The longest of five counts, since a busy machine
    makes some of them longer."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        made = json.loads(_DATA)
        sorted(str(sorted(one.items())) for one in made)
        times.append(time.thread_time() - began)
    return max(times)
