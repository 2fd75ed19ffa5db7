"""Ready stays True while requests succeed: through scaling, rollouts, lost pods and an operator's restart."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
from support.operator_status import (
    NOW,
    conditions,
    conditions_of,
    pod,
    pool,
    ready,
    revision,
    view,
    with_status,
    world,
)
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.plan.engines import ENGINES
from treeline_operator.plan.revision import target_revision
from treeline_operator.status.pool import pool_status
from treeline_operator.world import PickerView

T = ConditionType


def ready_of(seen):
    """Return the Ready condition, the only one compared here."""
    return conditions(pool_status(seen))[T.READY]


def test_a_scale_up_keeps_the_pool_ready_and_is_progress():
    mine = pool(replicas=3)
    serving = [pod(mine, f"tiny-{n}", **ready(n)) for n in (1, 2)]
    pods = (*serving, pod(mine, "tiny-new", phase="Pending"))
    seen = world(mine, children=(revision(mine, 3, 2),), pods=pods, picker=view(mine, "tiny-1", "tiny-2"))
    found = conditions_of(seen)
    assert (found[T.READY]["status"], found[T.READY]["reason"]) == ("True", Reason.SERVING)
    assert "tiny is served by 2 pods" in found[T.READY]["message"]
    assert found[T.PROGRESSING]["status"] == "True"
    assert found[T.WORKLOADS_READY]["status"] == "False"
    assert pool_status(seen)["replicaSummary"] == "2/3"


def rolling(old_spec, new_spec, **changes):
    """Return a pool whose spec has changed: an old pod serves, the new one starts."""
    before, now = pool(**old_spec), pool(**new_spec)
    old = revision(before, 1, 1)
    of_old = target_revision(before, ()).name
    pods = (pod(now, "old-1", revision=of_old, **ready(1)), pod(now, "new-1", phase="Pending"))
    return world(now, children=(old, revision(now, 1, 0)), pods=pods, picker=view(now, "old-1"), **changes)


def test_a_rollout_keeps_the_pool_ready_while_the_old_pods_serve_its_model():
    found = conditions_of(rolling({}, {"engine": {"contextLength": 512}}))
    assert (found[T.READY]["status"], found[T.READY]["reason"]) == ("True", Reason.SERVING)
    assert "meanwhile served by 1 pod of older revisions" in found[T.READY]["message"]
    assert (found[T.PROGRESSING]["status"], found[T.PROGRESSING]["reason"]) == ("True", Reason.ROLLING_OUT)
    assert found[T.MODEL_READY]["message"].startswith("1 pod of older revisions has loaded the model tiny")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rollout_to_another_model_name_is_not_ready_before_a_pod_serves_that_name(engine):
    of = {"engine": {"type": engine, "image": "x"}}
    uri = "builtin://tiny" if engine == "treeline" else "path:///weights"
    before = {**of, "model": {"uri": uri, "name": "old-name"}}
    found = conditions_of(rolling(before, {**of, "model": {"uri": uri, "name": "new-name"}}))
    assert found[T.READY]["status"] == "False", "no pod serves new-name yet"
    same = {**before, "drain": {"timeoutSeconds": 90}}
    assert conditions_of(rolling(before, same))[T.READY]["status"] == "True"


def test_a_pool_that_serves_with_fewer_pods_says_why():
    mine = pool(replicas=2)
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 5, "ready": False}
    crashed = pod(mine, "tiny-2", containerStatuses=[{"name": "runtime", "image": "x", **waiting}])
    seen = world(
        mine,
        children=(revision(mine, 2, 1),),
        pods=(pod(mine, "tiny-1", **ready(1)), crashed),
        picker=view(mine, "tiny-1"),
    )
    found = conditions_of(seen)
    assert (found[T.READY]["status"], found[T.READY]["reason"]) == ("True", Reason.CRASH_LOOPING)
    assert found[T.READY]["message"].startswith("tiny is served by 1 pod at")
    assert Reason.CRASH_LOOPING.fix in found[T.READY]["message"]


@pytest.mark.parametrize("picker", [view(pool()), PickerView(True, {})])
def test_a_pool_whose_ready_pods_the_picker_does_not_list_at_all_is_not_ready(picker):
    found = conditions_of(world(picker=picker))
    assert (found[T.READY]["status"], found[T.READY]["reason"]) == ("False", Reason.ENDPOINTS_MISSING)


def test_a_new_operator_keeps_the_pickers_state_for_half_a_minute():
    well = world()
    before = with_status(well, pool_status(well), NOW)
    started = dataclasses.replace(before, picker=None)
    assert ready_of(started)["status"] == "True", "it has not been asked"
    silent = dataclasses.replace(started, picker_silent_since=NOW - timedelta(seconds=29))
    assert ready_of(silent)["status"] == "True"
    longer = dataclasses.replace(started, picker_silent_since=NOW - timedelta(seconds=30))
    assert (ready_of(longer)["status"], ready_of(longer)["reason"]) == ("Unknown", Reason.PICKER_UNREACHABLE)
    first = dataclasses.replace(well, picker=None)
    assert conditions_of(first)[T.READY]["status"] == "Unknown", "it was never seen healthy"
