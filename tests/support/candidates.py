"""Candidates for policies, without a picker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from treeline_epp.picking.endpoint import identity_of
from treeline_epp.picking.policies.base import Candidates


def candidates(
    names: Sequence[str],
    *,
    load: Sequence[float] | None = None,
    cost: Sequence[float] | None = None,
    cached: Sequence[float] | None = None,
    prompt: float = 1000.0,
    adapters: dict[str, set[str]] | None = None,
    now: float = 0.0,
) -> Candidates:
    """Return candidates. `load`, `cost` and `cached` are zeros unless given; `adapters` are those that each has
    loaded."""
    zeros = [0.0] * len(names)
    held = np.array(cached or zeros, float)
    known = adapters or {}
    return Candidates(
        np.array(cost or zeros, float),
        held,
        prompt - held,
        np.array([identity_of(name) for name in names]),
        np.array(load or zeros, float),
        lambda lora: np.array([lora in known.get(name, ()) for name in names]),
        now,
    )
