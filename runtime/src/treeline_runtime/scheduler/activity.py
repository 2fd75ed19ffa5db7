"""What the scheduler is doing: kept at hardly any cost, said when it has stood still for too long."""

from __future__ import annotations

import time
from collections.abc import Callable

from treeline_runtime.core import Batch

SHOWN = 64
"""Requests that are named."""


class Activity:
    """`begin` is called by the scheduler, `describe` by another thread, while the scheduler may be anywhere."""

    def __init__(self, totals: Callable[[], str]) -> None:
        """totals: one line about everything else."""
        self._totals = totals
        self._now: tuple[str, Batch | None, float] = ("starting", None, time.monotonic())

    def begin(self, what: str, batch: Batch | None = None) -> None:
        self._now = (what, batch, time.monotonic())

    def describe(self) -> str:
        """Ids, lengths and phase of the batch; no text, no tokens."""
        what, batch, since = self._now
        lines = [f"{what} for {time.monotonic() - since:.1f} s"]
        if batch is not None:
            lines[0] += f": {batch.phase.name.lower()}, {len(batch.reqs)} requests, {batch.num_tokens} tokens"
            for req, start, end in list(zip(batch.reqs, batch.starts, batch.ends, strict=True))[:SHOWN]:
                lines.append(
                    f"  {req.rid!r:.120}: prompt {req.prompt_len}, output {req.output_len}, "
                    f"cached {max(req.cached_tokens, 0)}, computes {start} to {end}, {req.retractions} retractions"
                )
            if len(batch.reqs) > SHOWN:
                lines.append(f"  … and {len(batch.reqs) - SHOWN} others")
        try:
            lines.append(self._totals())
        except Exception as error:  # looked at in the middle of a change
            lines.append(f"totals: {error!r}")
        return "\n".join(lines)
