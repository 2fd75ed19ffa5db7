"""The status of a pool's picker, gateway and routes."""

from __future__ import annotations

import dataclasses

import pytest
from support.gateway_cluster import converged
from support.gateway_cluster import pool as gateway_pool
from support.operator_gateway_states import (
    BOTH_APIS,
    FINE,
    LATE,
    UNHEALTHY,
    front,
    part_event,
    part_pod,
    route,
    unready,
    upstream,
)
from support.operator_status import (
    conditions,
    conditions_of,
    container,
    deployment,
    event,
    gateway_children,
    observed,
    pod,
    pool,
    ready,
    revision,
    view,
    world,
)
from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Observed, PoolRouting

T = ConditionType


def test_a_conflict_is_reported_without_denying_that_requests_succeed():
    seen = world(LATE, others=(pool("older"),), picker=view(LATE, "late-1"))
    told = conditions_of(seen)[T.READY]
    assert told["status"] == "True"
    assert told["reason"] == Reason.GATEWAY_CONFLICT, "the column REASON says it"
    assert "endpointPicker.replicas is 2 here" in told["message"]
    assert pool_status(seen)["gateway"]["owner"] == "older"


def test_ready_envoys_outside_the_service_are_no_ready_gateway():
    """The Deployment counts them as ready, but clients do not reach them."""
    picker, envoy, service, _ = gateway_children()
    selects_none = observed("EndpointSlice", "s", meta={"labels": {"kubernetes.io/service-name": service.ref.name}})
    running = envoy_pod("treeline-edge-1", "now", **ready())
    for slices in ((), (selects_none,)):
        seen = world(gateway_parts=(picker, envoy, service, *slices), gateway_pods=(running,))
        found = conditions_of(seen)[T.GATEWAY_READY]
        assert (found["status"], found["reason"]) == ("False", Reason.GATEWAY_NOT_READY)
        assert "no ready Envoy" in found["message"]


def test_a_service_without_its_port_is_no_ready_gateway():
    picker, envoy, service, slices = gateway_children()
    moved = Observed.of({**service.object, "spec": {"ports": [{"name": "http", "port": 81}]}})
    found = conditions_of(world(gateway_parts=(picker, envoy, moved, slices)))[T.GATEWAY_READY]
    assert (found["status"], found["reason"]) == ("False", Reason.GATEWAY_NOT_READY)
    assert "has no port 80" in found["message"]


def front_parts(revision, *, overdue=False):
    """Return the parts of a gateway whose Envoy should have a configuration, and one ready pod with any
    configuration."""
    late = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    picker, _, *front = gateway_children()
    made = deployment("treeline-edge", 1, 1, conditions=late if overdue else ()).object
    made["spec"]["template"] = {"metadata": {"labels": {names.REVISION: revision}}}
    return picker, Observed.of(made), *front


def envoy_pod(name, revision, ending=False, **status):
    marks = {names.COMPONENT: "edge", names.REVISION: revision}
    meta = {"labels": marks, "uid": f"uid-{name}"} | ({"deletionTimestamp": "2026-11-20T12:00:00Z"} if ending else {})
    return observed("Pod", name, meta=meta, status=status)


def test_envoys_with_former_settings_do_not_count_as_ready():
    """After TLS or API keys are switched on, status.url and the keys would not match the old pods that still answer."""
    old = envoy_pod("treeline-edge-old", "before", **ready())
    new = envoy_pod(
        "treeline-edge-new", "now", phase="Pending", conditions=[{"type": "PodScheduled", "status": "True"}]
    )
    told = 'MountVolume.SetUp failed for volume "tls" : secret "certificate" not found'
    seen = world(
        gateway_parts=front_parts("now"),
        gateway_pods=(old, new),
        events=(event("treeline-edge-new", "FailedMount", told),),
    )
    found = conditions_of(seen)[T.READY]
    assert (found["status"], found["reason"]) == ("False", Reason.CONFIG_ERROR)
    assert "treeline-edge (pods with former settings serve meanwhile)" in found["message"]
    assert 'secret "certificate" not found' in found["message"]
    one_of_them = world(
        gateway_parts=front_parts("now"), gateway_pods=(old, envoy_pod("treeline-edge-new", "now", **ready(2)))
    )
    found = conditions_of(one_of_them)[T.GATEWAY_READY]
    assert (found["status"], found["reason"]) == ("False", Reason.PODS_STARTING)
    served = world(
        gateway_parts=front_parts("now"),
        gateway_pods=(
            envoy_pod("treeline-edge-old", "before", ending=True, **ready()),
            envoy_pod("treeline-edge-new", "now", **ready(2)),
        ),
    )
    assert conditions_of(served)[T.READY]["status"] == "True"
    left = conditions_of(served)[T.PROGRESSING]
    assert (left["status"], left["reason"]) == ("True", Reason.ROLLING_OUT)
    assert "left of Envoys with former settings: 1 pod" in left["message"]
    gone = envoy_pod("treeline-edge-old", "before", phase="Succeeded")
    over = world(
        gateway_parts=front_parts("now"),
        gateway_pods=(gone, envoy_pod("treeline-edge-new", "now", **ready(2))),
    )
    assert conditions_of(over)[T.PROGRESSING]["reason"] == Reason.ROLLOUT_COMPLETE


def test_envoys_that_never_get_their_settings_are_reported():
    stuck = {"containerStatuses": [container("envoy", {"waiting": {"reason": "InvalidImageName"}})]}
    old, new = envoy_pod("edge-old", "now", **ready()), envoy_pod("edge-new", "now", **stuck)
    rolling = world(gateway_parts=front_parts("now"), gateway_pods=(old, new))
    assert conditions_of(rolling)[T.READY]["status"] == "True", "they are the same to clients"
    late = world(gateway_parts=front_parts("now", overdue=True), gateway_pods=(old, new))
    found = conditions_of(late)[T.GATEWAY_READY]
    assert (found["status"], found["reason"]) == ("False", Reason.IMAGE_PULL_FAILING)


def test_the_pickers_routing_mode_is_reported():
    mine = pool()
    one = pod(mine, "tiny-1", **ready())
    for routing, end in (
        (PoolRouting("events"), "; prefixes are found by events"),
        (PoolRouting("history", "NoEvents", "turn them on"), "; prefixes are found by history: NoEvents: turn them on"),
        (None, "ready pod (1)"),
    ):
        told = {} if routing is None else {"tiny": routing}
        picker = dataclasses.replace(view(mine, "tiny-1"), routing=told)
        found = conditions_of(world(mine, pods=(one,), picker=picker))["EndpointPickerReady"]
        assert found["status"] == "True"
        assert found["message"].removesuffix(".").endswith(end)


@pytest.mark.parametrize(
    ("component", "kind", "sick"),
    [
        ("epp", T.ENDPOINT_PICKER_READY, Reason.PICKER_NOT_READY),
        ("edge", T.GATEWAY_READY, Reason.GATEWAY_NOT_READY),
    ],
)
def test_a_probe_that_fails_is_part_of_a_start_for_the_first_minute(component, kind, sick):
    for seconds, reason in ((1, Reason.PODS_STARTING), (59, Reason.PODS_STARTING), (60, sick)):
        starting = part_pod(component, {**UNHEALTHY, "conditions": [unready(seconds)]})
        seen = world(
            gateway_parts=gateway_children(**{component: 0}),
            gateway_pods=(starting,),
            events=(part_event(component),),
        )
        found = conditions(pool_status(seen))[kind]
        assert (found["status"], found["reason"]) == ("False", reason), seconds
        assert "Readiness probe failed" in found["message"]


def test_a_listener_that_is_not_programmed_keeps_the_routes_attached_to_it_from_being_ready():
    for section, status in ((None, "True"), ("https", "False"), ("http", "True")):
        ref = {"name": "edge", "namespace": "infra", **({"sectionName": section} if section else {})}
        mine = pool(gateway={"parentRefs": [ref]})
        told = route(FINE).object
        told["status"]["parents"][0]["parentRef"] = ref
        seen = world(
            mine,
            children=(revision(mine, 1, 1), Observed.of(told), upstream("True", "Accepted")),
            platform=BOTH_APIS,
            gateway_parts=(deployment("treeline-epp", 1, 1),),
            parents=(front(listener="False"),),
        )
        found = conditions_of(seen)[T.READY]
        assert found["status"] == status, found
        assert (status == "True") or "listener https is not Programmed: Invalid: no certificate" in found["message"]


def test_a_gateway_whose_envoys_are_made_from_former_settings_is_not_ready_yet():
    """The gateway is planned separately: a pool must not be reported ready before its API keys are required."""
    picker, envoy, service, slices = gateway_children()
    made = converged(plain := gateway_pool("a"))

    def as_made(there):
        marks = made.get("Deployment", there.ref.name)["metadata"]["annotations"]
        return Observed.of({**there.object, "metadata": {**there.object["metadata"], "annotations": marks}})

    parts = (as_made(picker), as_made(envoy), service, slices)
    drains = {"drain": {"timeoutSeconds": plain.spec.drain.timeout_seconds}}
    found = conditions_of(world(pool(**drains), gateway_parts=parts))[T.GATEWAY_READY]
    assert found["status"] == "True"
    keys = {"gateway": {"standalone": {"apiKeysSecretRef": {"name": "keys"}}}}
    found = conditions_of(world(pool(**drains, **keys), gateway_parts=parts))[T.GATEWAY_READY]
    assert (found["status"], found["reason"]) == ("False", Reason.PENDING)
    assert "treeline-edge gets new settings" in found["message"]
    policy = {"endpointPicker": {"policy": "round_robin"}}
    found = conditions_of(world(pool(**drains, **policy), gateway_parts=parts))[T.GATEWAY_READY]
    assert (found["status"], found["reason"]) == ("False", Reason.PENDING)
    assert "treeline-epp gets new settings" in found["message"]
    seen = world(pool(**drains, **keys), gateway_parts=parts)
    after = dataclasses.replace(seen.gateway, pools=())  # the store may be ahead: its last pool has just gone
    left = dataclasses.replace(seen, gateway=after)
    assert conditions_of(left)[T.GATEWAY_READY]["status"] == "False"
