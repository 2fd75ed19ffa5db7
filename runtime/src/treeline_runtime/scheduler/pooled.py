"""What a prefill step adds to the vectors that its requests ask for, on its way from the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch

from treeline_runtime.core import Batch
from treeline_runtime.models.pooler import Pooler, Vector
from treeline_runtime.transfer import Readback


class Pooled:
    """Nothing waits for it until it is asked for, and it leaves no state on the device: a prompt that is computed in
    several steps has its parts added on the host, so a step that fails can be tried again, and a retracted request
    begins anew."""

    def __init__(self, batch: Batch, hidden: torch.Tensor, pooler: Pooler) -> None:
        """hidden (tokens of the batch, hidden)"""
        bounds = [0, *accumulate(batch.q_lens)]
        whole = [end == len(req.tokens) for req, end in zip(batch.reqs, batch.ends, strict=True)]
        self._reqs = [i for i, is_whole in enumerate(whole) if is_whole or pooler.pooling.needs_all]
        self._readback: Readback | None = None
        if self._reqs:
            self._readback = Readback(pooler.select(hidden, bounds[:-1], bounds[1:], whole))

    def get(self) -> Iterator[tuple[int, Vector, bool]]:
        """→ indices into batch.reqs, what the step gives each of them, and whether all of it is finite."""
        if self._readback is not None:
            rows = self._readback.get()[0].numpy()
            yield from zip(self._reqs, rows, np.isfinite(rows).all(1).tolist(), strict=True)
