"""The status of a pool: the reason for each state of its pods and its model, and its figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.operator_pool_states import PICKER, PROGRESS, rolling, routed, said, scaled, troubled
from support.operator_status import (
    LATER,
    check_whole,
    conditions,
    conditions_of,
    container,
    event,
    gateway_children,
    observed,
    pod,
    pool,
    ready,
    revision,
    view,
    with_status,
    world,
)
from support.operator_trouble import REJECTIONS, RUNNING, TROUBLES, init
from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.status.causes import Cause
from treeline_operator.status.pool import not_understood, pool_status
from treeline_operator.world import Observed, PickerEndpoint, PickerView

T = ConditionType


@pytest.mark.parametrize("name", TROUBLES)
def test_the_pools_status_names_the_cause_of_unready_pods(name):
    status, reason, text, *events = TROUBLES[name]
    noise = event("tiny-7", "FailedMount", 'secret "other" not found')
    seen = troubled(status, [noise, *events])
    told = conditions_of(seen)
    if status.get("phase") == "Failed":  # such a pod does not count any more; its Deployment makes another
        reason, text = Reason.PODS_STARTING, ""
    workloads, whole = told[T.WORKLOADS_READY], told[T.READY]
    assert (workloads["status"], workloads["reason"]) == ("False", reason)
    assert workloads["message"].startswith("1 of 2 pods are ready")
    assert whole["status"] == "True", "the other pod serves"
    assert whole["reason"] == (reason if reason.info.good is False else Reason.SERVING)
    assert whole["message"].startswith("tiny is served by 1 pod at ")
    assert text in workloads["message"]
    assert text in whole["message"]
    check_whole(seen, PROGRESS)


@pytest.mark.parametrize("reason", REJECTIONS)
def test_pods_that_cannot_be_made_are_reported(reason):
    failed = said("ReplicaFailure", "True", "FailedCreate", REJECTIONS[reason])
    seen = world(children=(revision(pool(), 1, 0, conditions=[failed]),), pods=(), picker=view(pool()))
    assert conditions_of(seen)[T.READY]["reason"] == reason
    check_whole(seen, PROGRESS)


def test_the_figures_of_a_pool_that_serves():
    mine = pool(replicas=2, model={"uri": "hf://org/Big-Model@main", "name": "big"})
    seen = world(mine, picker=view(mine, "tiny-1", "tiny-2", models=("big",)))
    status = pool_status(seen)
    revision_name = seen.children[0].object["metadata"]["labels"][names.REVISION]
    del status["conditions"]
    assert status == {
        "observedGeneration": 3,
        "replicas": 2,
        "readyReplicas": 2,
        "selector": "treeline.dev/component=runtime,treeline.dev/pool=tiny,treeline.dev/serving=true"
        ",treeline.dev/role!=prefill",
        "url": "http://treeline-gateway.shop.svc",
        "modelName": "big",
        "revision": revision_name,
        "replicaSummary": "2/2",
        "gateway": {"name": "treeline", "epp": "treeline-epp", "owner": "tiny"},
    }


def test_pods_that_drain_are_no_replicas():
    mine = pool(replicas=3)
    there = (
        pod(mine, "tiny-1", **ready(1)),
        pod(mine, "tiny-2", **ready(2)),
        pod(mine, "tiny-3", serving="false", **ready(3)),
        pod(mine, "tiny-4", **{**ready(4), "conditions": [], "podIP": "fd00::4"}),
        pod(mine, "tiny-5"),
    )
    seen = world(mine, pods=there, picker=view(mine, "tiny-1", "tiny-3", "tiny-4"))
    status = pool_status(seen)
    assert (status["replicas"], status["readyReplicas"]) == (4, 2)


@pytest.mark.parametrize(
    ("engine", "way", "reason", "warned"),
    [
        ("vllm", "events", "", False),
        ("sglang", "history", "NoEvents", True),
        ("vllm", "hashes", "TokenizerUnusable", False),
        ("custom", "history", "NoEvents", False),
    ],
)
def test_the_routing_mode_is_reported(engine: str, way: str, reason: str, warned: bool) -> None:
    seen = routed(pool(model={"uri": "hf://o/tiny"}, engine={"type": engine, "image": "x"}), way, reason)
    status = pool_status(seen)
    assert status["routing"] == ({"way": way, "reason": reason} if reason else {"way": way})
    assert ("Warnings" in conditions_of(seen)) is warned
    assert "routing" not in pool_status(world(seen.pool)), "a picker of a former version says nothing of it"


def drains(number: int, since: str, **meta: Any) -> Observed:
    made = pod(pool(), f"tiny-{number}", serving="false", **ready(number)).object
    made["metadata"] |= {"annotations": {names.DRAINING_SINCE: since}, **meta}
    return Observed.of(made)


def test_draining_pods_are_reported_with_what_is_left_and_until_when():
    stays = pod(pool(), "tiny-1", **ready())
    since = "2026-11-20T11:59:50.000Z"
    counts = {"tiny-1": 7, "tiny-2": 2, "tiny-3": 1}
    listed = tuple(PickerEndpoint(n, n, n == "tiny-1", n != "tiny-1", c) for n, c in counts.items())
    picker = PickerView(True, {"tiny": listed}, {"tiny": ("tiny",)})
    seen = world(pods=(stays, drains(2, since), drains(3, "2026-11-20T11:59:30.000Z")), picker=picker)
    told = conditions_of(seen)["Progressing"]
    text = "finishing their requests: 2 pods, 3 requests left, until 2026-11-20T12:00:50Z at the latest"
    assert text in told["message"]
    ends = drains(3, since, deletionTimestamp="2026-11-20T12:01:05Z")
    told = conditions_of(world(pods=(stays, ends), picker=picker))["Progressing"]
    assert "1 pod, 1 request left, until 2026-11-20T12:01:05Z at the latest" in told["message"]
    assert told["reason"] == "Draining"


def test_a_rollout_names_the_draining_pods():
    seen = rolling(target_ready=1)
    extra = drains(9, "2026-11-20T11:59:50.000Z")
    told = conditions_of(dataclasses.replace(seen, pods=(*seen.pods, extra)))["Progressing"]
    assert (told["reason"], told["status"]) == ("RollingOut", "True")
    assert "finishing their requests: 1 pod, until 2026-11-20T12:00:50Z at the latest" in told["message"]


def test_downloads_are_added_up():
    mine = pool(replicas=2)
    there = tuple(pod(mine, f"tiny-{n}", **init(RUNNING)) for n in (1, 2))
    seen = world(mine, pods=there, picker=view(mine))
    told = {"tiny-1": (10, 100), "tiny-2": (50, 100), "other": (1, 1)}
    assert pool_status(seen, told)["download"] == {"percent": 30, "bytesDone": 60, "bytesTotal": 200}
    assert "download" not in pool_status(seen, {"tiny-1": (10, 0)})
    assert "download" not in pool_status(seen)
    assert "download" not in pool_status(world(mine), told)


def test_problems_that_need_action_come_first():
    """The pods are only starting, but Envoy's image is wrong."""
    status = {"containerStatuses": [container("envoy", {"waiting": {"reason": "InvalidImageName"}})]}
    meta = {"labels": {names.COMPONENT: "edge"}}
    seen = world(
        pods=(pod(pool(), "tiny-1"),),
        gateway_parts=gateway_children(edge=0),
        gateway_pods=(observed("Pod", "treeline-edge-1", meta=meta, status=status),),
    )
    told = conditions_of(seen)
    assert told[T.WORKLOADS_READY]["reason"] == Reason.PODS_STARTING
    assert told[T.READY]["reason"] == Reason.IMAGE_PULL_FAILING


def test_a_refused_write_is_reported_where_it_matters():
    refused = Cause(Reason.QUOTA_EXCEEDED, "exceeded quota: storage")
    nothing = conditions(pool_status(world(children=(), pods=()), refused=refused))
    assert nothing[T.WORKLOADS_READY]["reason"] == nothing[T.READY]["reason"] == Reason.QUOTA_EXCEEDED
    serving = conditions(pool_status(world(), refused=refused))
    assert serving[T.PROGRESSING]["reason"] == Reason.QUOTA_EXCEEDED
    assert serving[T.READY]["status"] == "True", "requests succeed all the same"


def test_a_deployment_that_its_controller_has_not_read_is_not_settled():
    stale = revision(pool(), 1, 1).object
    stale["metadata"]["generation"] = 2
    seen = world(children=(type(world().children[0]).of(stale),))
    told = conditions_of(seen)
    assert told[T.WORKLOADS_READY]["status"] == "False"
    assert told[T.PROGRESSING]["status"] == "True"


def test_an_invalid_spec_keeps_the_figures_and_drops_stale_conditions():
    before = pool_status(world())
    obj = {"metadata": {"name": "tiny", "generation": 9}, "status": before}
    problem = Cause(Reason.SPEC_NOT_UNDERSTOOD, "spec.engine.type: Input should be 'treeline'")
    status = not_understood(obj, problem, LATER, T.READY)
    (told,) = status["conditions"]
    assert (told["type"], told["status"], told["reason"]) == ("Ready", "False", Reason.SPEC_NOT_UNDERSTOOD)
    assert "Upgrade the operator" in told["message"]
    assert told["observedGeneration"] == status["observedGeneration"] == 9
    assert status["selector"] == before["selector"]
    again = not_understood({**obj, "status": status}, problem, LATER, T.READY)
    assert again == status


def test_meaningless_conditions_are_removed():
    before = pool_status(scaled(PICKER))
    assert T.SCALING_ACTIVE in conditions(before)
    after = conditions_of(with_status(world(), before))
    assert T.SCALING_ACTIVE not in after
    assert T.ROUTE_ACCEPTED not in after
