"""What a prefill step adds to the vectors that its requests ask for, on its way from the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch

from treeline_runtime.models.pooler import Pooler, Vector
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.transfer import Readback


class Pooled:
    """Nothing waits for it until it is asked for, and it leaves no state on the device: a prompt that is computed in
    several steps has its parts added on the host, so a step that fails can be tried again, and a retracted request
    starts over."""

    def __init__(self, plan: StepPlan, hidden: torch.Tensor, pooler: Pooler) -> None:
        """hidden (tokens of the step, hidden)"""
        bounds = [0, *accumulate(plan.q_lens)]
        self._sequences = [i for i, is_whole in enumerate(plan.whole) if is_whole or pooler.pooling.needs_all]
        self._readback: Readback | None = None
        if self._sequences:
            self._readback = Readback(pooler.select(hidden, bounds[:-1], bounds[1:], plan.whole))

    def get(self) -> Iterator[tuple[int, Vector, bool]]:
        """→ numbers of sequences, what the step gives each of them, and whether all of it is finite."""
        if self._readback is not None:
            rows = self._readback.get()[0].numpy()
            yield from zip(self._sequences, rows, np.isfinite(rows).all(1).tolist(), strict=True)
