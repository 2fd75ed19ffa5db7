"""The status keeps the last change of replicas that the pickers' demand caused."""

from __future__ import annotations

import dataclasses

from support.operator_pool_states import PICKER, scaled
from support.operator_status import NOW
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Scaled, Scaling

FIGURES = {"lastScaleTime": "2026-11-20T12:00:00Z", "replicas": 3, "message": "why"}


def test_the_last_change_is_reported_with_what_asked_for_it() -> None:
    world = scaled(PICKER, scaling=Scaling(True, "", Scaled(NOW, 3, "why")))
    assert pool_status(world)["autoscaling"] == FIGURES
    without = dataclasses.replace(world, scaling=Scaling(False, "", Scaled(NOW, 3, "w" * 600)))
    assert pool_status(without)["autoscaling"] == {**FIGURES, "message": "w" * 512}


def test_the_last_scaling_of_a_former_operator_stays_in_the_status() -> None:
    for auto, kept in ((PICKER, FIGURES), ({"type": "None"}, None)):
        world = scaled(auto, scaling=Scaling(True))
        world.pool.status["autoscaling"] = FIGURES  # type: ignore[typeddict-item]
        assert pool_status(world).get("autoscaling") == kept
