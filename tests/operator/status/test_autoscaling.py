"""What the status keeps of the last time that the replicas were set by the pickers' demand."""

from __future__ import annotations

import dataclasses

from support.operator_pool_states import PICKER, scaled
from support.operator_status import NOW
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Scaled, Scaling
from treeline_wire.signals import Asked, PoolSignals, Waiting

TOLD = PoolSignals(Asked(Waiting(2, 500), Waiting(3, 0), 1, 0.1, 0.2504), {}, 1, 1000, 7, 0)
FIGURES = {
    "lastScaleTime": "2026-11-20T12:00:00Z",
    "replicas": 3,
    "message": "why",
    "heldRequests": 2,
    "missedRequests": 3,
    "queuedTokens": 1500,
    "inFlightRequests": 7,
    "ttftMilliseconds": 250,
}


def test_the_figures_are_told_by_which_it_was_decided() -> None:
    world = scaled(PICKER, scaling=Scaling(True, "", Scaled(NOW, 3, "why", TOLD)))
    assert pool_status(world)["autoscaling"] == FIGURES
    without = dataclasses.replace(world, scaling=Scaling(False, "", Scaled(NOW, 1, "w" * 600)))
    assert pool_status(without)["autoscaling"] == {
        "lastScaleTime": "2026-11-20T12:00:00Z",
        "replicas": 1,
        "message": "w" * 512,
    }


def test_what_an_operator_before_this_one_did_stays_while_the_pool_is_scaled_so() -> None:
    for auto, kept in ((PICKER, FIGURES), ({"type": "None"}, None)):
        world = scaled(auto, scaling=Scaling(True))
        world.pool.status["autoscaling"] = FIGURES  # type: ignore[typeddict-item]
        assert pool_status(world).get("autoscaling") == kept
