"""The status of a pool: what each state of the cluster is called, and that Ready says the truth."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from support.operator_status import (
    LATER,
    NOW,
    check_whole,
    conditions,
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
    with_status,
    world,
)
from support.operator_trouble import CREATING, POD, REJECTIONS, RUNNING, TROUBLES, init
from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.plan.routes import ROUTE, UPSTREAM
from treeline_operator.status.causes import Cause
from treeline_operator.status.pool import MAX_ENDPOINTS, not_understood, pool_status
from treeline_operator.world import TEMPLATE_VERSION, Observed, PickerEndpoint, PickerView, Platform

TWO = {"replicas": 2}
GATED = pool(gateway={"parentRefs": [{"name": "edge", "namespace": "infra"}], "hostnames": ["llm.example"]})
BOTH_APIS = Platform(apis=frozenset((ROUTE, UPSTREAM)))
HPA = {"type": "HPA", "maxReplicas": 4, "hpa": {"metrics": [{"type": "Resource"}]}}
KEDA = {"type": "KEDA", "minReplicas": 0, "maxReplicas": 4, "keda": {"triggers": [{"type": "cron"}]}}
WITH_KEDA = Platform(apis=frozenset(("keda.sh/v1alpha1/ScaledObject",)))


def pods_of(mine, count, **last):
    """So many ready pods, and one more in the given state."""
    there = [pod(mine, f"tiny-{n}", **ready(n)) for n in range(2, count + 2)]
    return (*there, pod(mine, POD, **last))


def old(mine, count=1, **more):
    return tuple(pod(mine, f"old-{n}", revision="before", **{**ready(90 + n), **more}) for n in range(count))


def route(*told, generation=1):
    """An HTTPRoute of which parents tell (status, reason) pairs of conditions Accepted and ResolvedRefs."""
    entries = [
        {
            "parentRef": {"group": "gateway.networking.k8s.io", "name": "edge", "namespace": "infra"},
            "controllerName": "example.com/controller",
            "conditions": [
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": "so it is",
                    "observedGeneration": 1,
                }
                for kind, (status, reason) in zip(("Accepted", "ResolvedRefs"), pair, strict=True)
            ],
        }
        for pair in told
    ]
    meta = {"generation": generation}
    return observed("HTTPRoute", "tiny", "gateway.networking.k8s.io/v1", meta=meta, status={"parents": entries})


def upstream(status, reason):
    condition = {"type": "Accepted", "status": status, "reason": reason, "message": "no pools here"}
    entries = [
        {
            "parentRef": {"kind": "Status", "name": "default"},
            "conditions": [{**condition, "status": "Unknown"}],
        },
        {"parentRef": {"name": "edge", "namespace": "infra"}, "conditions": [condition]},
    ]
    return observed("InferencePool", "tiny-gie", "inference.networking.k8s.io/v1", status={"parents": entries})


def front(status="True", reason="Programmed", listener="True"):
    """The Gateway that the pool is attached to, and whether it listens."""
    told = {"type": "Programmed", "status": status, "reason": reason, "message": "told by its controller"}
    said = {"type": "Programmed", "status": listener, "reason": "Invalid", "message": "no certificate"}
    conditions = [] if status is None else [told]
    listeners = [{"name": "https", "conditions": [said]}]
    fields = {"meta": {"namespace": "infra"}, "status": {"conditions": conditions, "listeners": listeners}}
    return observed("Gateway", "edge", "gateway.networking.k8s.io/v1", **fields)


FINE = (("True", "Accepted"), ("True", "ResolvedRefs"))


def gated(*children, **changes):
    gateway_parts = (deployment("treeline-epp", 1, 1),)
    changes = {"platform": BOTH_APIS, "gateway_parts": gateway_parts, **changes}
    return world(GATED, children=(revision(GATED, 1, 1), *children), **changes)


def scaled(autoscaling, *children, **changes):
    mine = pool(autoscaling=autoscaling)
    return world(mine, children=(revision(mine, 1, 1), *children), **changes)


def hpa(*told):
    return observed("HorizontalPodAutoscaler", "tiny", "autoscaling/v2", status={"conditions": list(told)})


def keda(*told):
    return observed("ScaledObject", "tiny", "keda.sh/v1alpha1", status={"conditions": list(told)})


def said(kind, status, reason="X", message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def troubled(status, events=(), count=1, spec=TWO):
    mine = pool(**spec)
    there = pods_of(mine, count, **status)
    serving = [one.ref.name for one in there[:-1]]
    return world(
        mine,
        children=(revision(mine, count + 1, count),),
        pods=there,
        events=tuple(events),
        picker=view(mine, *serving),
    )


def rolling(spec=None, *, target_ready=0, replicas=1, conditions=(), pods=None, **changes):
    mine = pool(**(spec or {}))
    fresh = [pod(mine, f"tiny-{n}", **(ready(n) if n <= target_ready else {})) for n in range(1, replicas + 1)]
    there = tuple(fresh) if pods is None else tuple(pods)
    return world(
        mine,
        children=(revision(mine, replicas, target_ready, conditions=conditions),),
        pods=(*there, *old(mine)),
        picker=view(mine, *(f"tiny-{n}" for n in range(1, target_ready + 1)), "old-0"),
        **changes,
    )


OVERDUE = [said("Progressing", "False", "ProgressDeadlineExceeded")]
ROOT = pool(template={"spec": {"hostNetwork": True}})
BROKEN = pool(template={"containers": []})
ZERO = pool(replicas=0)
KEYS = 'MountVolume.SetUp failed for volume "keys" : secret "treeline-kv-keys" not found'
BALANCER = {"serviceType": "LoadBalancer"}
KEYED = {"apiKeysSecretRef": {"name": "keys"}}
ADDRESS = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
SALTED = pool(model={"uri": "hf://o/n"}, engine={"type": "vllm"}, gateway={"standalone": KEYED})
BALANCED = pool(gateway={"standalone": {"serviceType": "LoadBalancer", "port": 8080}})
LATE = pool("late", created="2026-11-02T00:00:00Z", endpointPicker={"policy": "random"})
UNHEALTHY = {"phase": "Running", "containerStatuses": [container("c", RUNNING, started=True)]}


CREATING_ONE = {"phase": "Pending", "containerStatuses": [container("c", CREATING)]}


def part_pod(component, status=UNHEALTHY):
    meta = {"labels": {names.COMPONENT: component}}
    return observed("Pod", f"treeline-{component}-1", meta=meta, status=status)


def unready(seconds):
    """The condition of a pod that has not been ready for so long."""
    since = (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    return {"type": "Ready", "status": "False", "lastTransitionTime": since}


def part_event(component):
    return event(f"treeline-{component}-1", "Unhealthy", "Readiness probe failed: 503")


def gone_from(*kinds):
    return tuple(child for child in gateway_children() if child.ref.kind not in kinds)


T = ConditionType
PROGRESS = {POD: (3 << 30, 4 << 30)}

# name: (world, condition, status, reason, part of the message)
STATES = {
    "serves": (
        world(),
        T.READY,
        "True",
        Reason.SERVING,
        "tiny is served by 1 pod at http://treeline-gateway.shop.svc",
    ),
    "all is settled": (world(), T.PROGRESSING, "False", Reason.ROLLOUT_COMPLETE, "1 of 1 pods are ready"),
    "pods": (world(), T.WORKLOADS_READY, "True", Reason.PODS_READY, "1 of 1"),
    "model": (world(), T.MODEL_READY, "True", Reason.MODEL_LOADED, "1 pod has loaded the model tiny"),
    "picker": (world(), T.ENDPOINT_PICKER_READY, "True", Reason.PICKER_SYNCED, "every ready pod (1)"),
    "gateway": (world(), T.GATEWAY_READY, "True", Reason.GATEWAY_SERVING, "gateway treeline is ready"),
    "model, twice": (world(pool(**TWO)), T.MODEL_READY, "True", Reason.MODEL_LOADED, "2 pods have loaded"),
    "no keys yet": (
        world(children=(), pods=(), gateway_parts=()),
        T.WORKLOADS_READY,
        "False",
        Reason.KEYS_PENDING,
        "as soon as gateway treeline has its keys",
    ),
    "no keys needed": (
        world(pool(engine={"type": "custom", "image": "x"}), children=(), pods=(), gateway_parts=()),
        T.WORKLOADS_READY,
        "False",
        Reason.PENDING,
        "is not there yet",
    ),
    "nothing there": (
        world(children=(), pods=()),
        T.WORKLOADS_READY,
        "False",
        Reason.PENDING,
        "is not there yet",
    ),
    "no pods yet": (
        world(pods=()),
        T.WORKLOADS_READY,
        "False",
        Reason.PODS_STARTING,
        "0 of 1 pods are ready",
    ),
    "no pods, no model": (world(pods=()), T.MODEL_READY, "Unknown", Reason.PODS_STARTING, "builtin://tiny"),
    "zero": (
        world(ZERO, pods=()),
        T.READY,
        "False",
        Reason.SCALED_TO_ZERO,
        "replicas is 0: requests for the model are answered 503",
    ),
    "zero, pods": (
        world(ZERO, pods=()),
        T.WORKLOADS_READY,
        "True",
        Reason.SCALED_TO_ZERO,
        "no pods are asked for",
    ),
    "zero, model": (world(ZERO, pods=()), T.MODEL_READY, "Unknown", Reason.SCALED_TO_ZERO, "no pod loads"),
    "zero, settled": (world(ZERO, pods=()), T.PROGRESSING, "False", Reason.SCALED_TO_ZERO, "no pods"),
    "deleted": (
        world(pool().model_copy(update={"metadata": pool().metadata.model_copy(update={"deletion_timestamp": LATER})})),
        T.READY,
        "False",
        Reason.DELETING,
        "is being deleted",
    ),
    "rolling": (
        rolling(),
        T.WORKLOADS_READY,
        "False",
        Reason.PODS_STARTING,
        "0 of 1 pods are ready; 1 of 1 pods (tiny-1): starts; meanwhile served by 1 pod of older revisions",
    ),
    "rolling, no new pod": (
        rolling(pods=()),
        T.WORKLOADS_READY,
        "False",
        Reason.ROLLING_OUT,
        "meanwhile served by 1 pod",
    ),
    "rolling, progress": (
        rolling(),
        T.PROGRESSING,
        "True",
        Reason.ROLLING_OUT,
        "left of older revisions: 1 pod",
    ),
    "rolling, last": (
        rolling(target_ready=1),
        T.PROGRESSING,
        "True",
        Reason.ROLLING_OUT,
        "left of older revisions: 1 pod",
    ),
    "first start": (troubled({}), T.PROGRESSING, "True", Reason.PODS_STARTING, "1 of 2 pods are ready"),
    "stalled": (
        rolling(conditions=OVERDUE),
        T.PROGRESSING,
        "False",
        Reason.ROLLOUT_STALLED,
        "0 of 1 pods are ready",
    ),
    "paused": (
        rolling({"rollout": {"paused": True}}, pods=()),
        T.PROGRESSING,
        "False",
        Reason.PAUSED,
        "kept of older revisions: 1 pod",
    ),
    "paused, pods": (
        rolling({"rollout": {"paused": True}}, pods=()),
        T.READY,
        "False",
        Reason.PAUSED,
        "meanwhile",
    ),
    "scaling up": (world(pool(replicas=3), pods=()), T.PROGRESSING, "True", Reason.SCALING, "0 of 3 pods"),
    "scaling down": (
        world(pods=tuple(pod(pool(), f"tiny-{n}", **ready(n)) for n in (1, 2))),
        T.PROGRESSING,
        "True",
        Reason.SCALING,
        "2 of 1 pods are ready",
    ),
    "draining": (
        world(pods=(pod(pool(), "tiny-1", **ready()), pod(pool(), "tiny-2", serving="false", **ready(2)))),
        T.PROGRESSING,
        "True",
        Reason.DRAINING,
        "finishing their requests: 1 pod",
    ),
    "bad template": (
        world(BROKEN, children=(), pods=()),
        T.READY,
        "False",
        Reason.TEMPLATE_INVALID,
        "containers is not part of a pod template",
    ),
    "less confined": (
        world(ROOT),
        T.SECURITY_EXCEPTIONS,
        "True",
        Reason.POD_SECURITY_EXCEPTION,
        "hostNetwork is on",
    ),
    "other model": (
        world(picker=view(pool(), "tiny-1", models=("gpt2",))),
        T.MODEL_READY,
        "False",
        Reason.MODEL_NOT_SERVED,
        "the pods serve gpt2, not tiny",
    ),
    "download": (
        troubled(init(RUNNING), count=0, spec={}),
        T.MODEL_READY,
        "False",
        Reason.WEIGHTS_DOWNLOADING,
        "75 % of builtin://tiny are there, downloaded by 1 pod",
    ),
    "no picker yet": (
        world(gateway_parts=()),
        T.ENDPOINT_PICKER_READY,
        "False",
        Reason.PENDING,
        "Deployment treeline-epp is not there yet",
    ),
    "picker starts": (
        world(gateway_parts=gateway_children(epp=0)),
        T.ENDPOINT_PICKER_READY,
        "False",
        Reason.PODS_STARTING,
        "has no pods yet",
    ),
    "picker is sick": (
        world(
            gateway_parts=gateway_children(epp=0),
            gateway_pods=(part_pod("epp"),),
            events=(part_event("epp"),),
        ),
        T.ENDPOINT_PICKER_READY,
        "False",
        Reason.PICKER_NOT_READY,
        "Deployment treeline-epp: 1 of 1 pods (treeline-epp-1): container c runs, but: Readiness probe failed",
    ),
    "picker has no keys": (
        world(
            gateway_parts=gateway_children(epp=0),
            gateway_pods=(part_pod("epp", CREATING_ONE),),
            events=(event("treeline-epp-1", "FailedMount", KEYS),),
        ),
        T.READY,
        "False",
        Reason.KEY_SECRET_MISSING,
        "treeline-kv-keys",
    ),
    "picker not synced": (
        world(picker=view(pool(), "tiny-1", synced=False)),
        T.READY,
        "False",
        Reason.PICKER_NOT_SYNCED,
        "has not read the cluster",
    ),
    "picker is silent": (world(picker=None), T.READY, "Unknown", Reason.PICKER_UNREACHABLE, "treeline-epp"),
    "picker is not asked": (
        world(picker=None, platform=Platform(picker_probe=False)),
        T.ENDPOINT_PICKER_READY,
        "True",
        Reason.PICKER_SYNCED,
        "its list of pods is not checked",
    ),
    "picker lacks one": (
        world(pool(**TWO), picker=view(pool(), "tiny-2")),
        T.ENDPOINT_PICKER_READY,
        "False",
        Reason.ENDPOINTS_MISSING,
        "would choose 1 of 2 ready pods, not tiny-1",
    ),
    "picker lacks one, progress": (
        world(pool(**TWO), picker=view(pool(), "tiny-2")),
        T.PROGRESSING,
        "True",
        Reason.ENDPOINTS_MISSING,
        "not tiny-1",
    ),
    "gateway is sick": (
        world(
            gateway_parts=gateway_children(edge=0),
            gateway_pods=(part_pod("edge"),),
            events=(part_event("edge"),),
        ),
        T.READY,
        "False",
        Reason.GATEWAY_NOT_READY,
        "Deployment treeline-edge: ",
    ),
    "no service yet": (
        world(gateway_parts=gone_from("Service")),
        T.GATEWAY_READY,
        "False",
        Reason.PENDING,
        "Service treeline-gateway is not there yet",
    ),
    "no address": (
        world(BALANCED),
        T.GATEWAY_READY,
        "False",
        Reason.ADDRESS_PENDING,
        "inside the cluster treeline-gateway.shop.svc serves",
    ),
    "conflict": (
        world(LATE, others=(pool("older"),)),
        T.GATEWAY_READY,
        "True",
        Reason.GATEWAY_CONFLICT,
        "with the settings of pool older: endpointPicker.policy is random here, treeline in pool older (older)",
    ),
    "open to the world": (
        world(BALANCED, gateway_parts=gateway_children(service=ADDRESS)),
        T.GATEWAY_READY,
        "True",
        Reason.GATEWAY_OPEN,
        "its load balancer has no apiKeysSecretRef and no tls",
    ),
    "keys in the clear": (
        world(pool(gateway={"standalone": BALANCER | KEYED}), gateway_parts=gateway_children(service=ADDRESS)),
        T.GATEWAY_READY,
        "True",
        Reason.GATEWAY_OPEN,
        "its load balancer has no tls",
    ),
    "keys and certificate": (
        world(
            pool(gateway={"standalone": BALANCER | KEYED | {"tls": {"secretRef": {"name": "cert"}}}}),
            gateway_parts=gateway_children(service=ADDRESS),
        ),
        T.GATEWAY_READY,
        "True",
        Reason.GATEWAY_SERVING,
        "is ready",
    ),
    "clients kept apart by the picker alone": (
        world(SALTED),
        T.GATEWAY_READY,
        "True",
        Reason.FAIL_CLOSE_FORCED,
        "it refuses requests while no picker answers",
    ),
    "no Gateway API": (
        gated(platform=Platform()),
        T.READY,
        "False",
        Reason.GATEWAY_API_MISSING,
        "gateway.networking.k8s.io/v1/HTTPRoute",
    ),
    "no Inference Extension": (
        gated(platform=Platform(apis=frozenset((ROUTE,)))),
        T.GATEWAY_READY,
        "False",
        Reason.INFERENCE_EXTENSION_MISSING,
        "inference.networking.k8s.io/v1/InferencePool",
    ),
    "no route yet": (gated(), T.ROUTE_ACCEPTED, "Unknown", Reason.ROUTE_PENDING, "is not there yet"),
    "route unjudged": (gated(route()), T.READY, "Unknown", Reason.ROUTE_PENDING, "Gateway infra/edge"),
    "route judged before": (
        gated(route(FINE, generation=2)),
        T.READY,
        "Unknown",
        Reason.ROUTE_PENDING,
        "infra/edge",
    ),
    "route half judged": (
        gated(route((("True", "Accepted"), ("Unknown", "Pending")))),
        T.ROUTE_ACCEPTED,
        "Unknown",
        Reason.ROUTE_PENDING,
        "not judged yet: Gateway infra/edge",
    ),
    "route accepted": (
        gated(route(FINE)),
        T.ROUTE_ACCEPTED,
        "True",
        Reason.ROUTE_ACCEPTED,
        "Gateway infra/edge",
    ),
    "route serves": (gated(route(FINE)), T.READY, "True", Reason.SERVING, "at http://llm.example"),
    "route refused": (
        gated(route((("False", "NotAllowedByListeners"), ("True", "ResolvedRefs")))),
        T.READY,
        "False",
        Reason.ROUTE_NOT_ACCEPTED,
        "Gateway infra/edge: Accepted is False, NotAllowedByListeners: so it is",
    ),
    "pools unsupported": (
        gated(route((("True", "Accepted"), ("False", "InvalidKind")))),
        T.ROUTE_ACCEPTED,
        "False",
        Reason.UNSUPPORTED_BY_PARENT,
        "ResolvedRefs is False, InvalidKind",
    ),
    "pool refused": (
        gated(route(FINE), upstream("False", "NotSupportedByParent")),
        T.ROUTE_ACCEPTED,
        "False",
        Reason.UNSUPPORTED_BY_PARENT,
        "Gateway edge, of the pool: Accepted is False",
    ),
    "pool accepted": (
        gated(route(FINE), upstream("True", "Accepted")),
        T.ROUTE_ACCEPTED,
        "True",
        Reason.ROUTE_ACCEPTED,
        "accepted by Gateway infra/edge",
    ),
    "no autoscaler yet": (
        scaled(HPA),
        T.SCALING_ACTIVE,
        "Unknown",
        Reason.PENDING,
        "HorizontalPodAutoscaler",
    ),
    "autoscaler unseen": (scaled(HPA, hpa()), T.SCALING_ACTIVE, "Unknown", Reason.PENDING, "its controller"),
    "autoscaler works": (
        scaled(HPA, hpa(said("AbleToScale", "True"), said("ScalingActive", "True"))),
        T.SCALING_ACTIVE,
        "True",
        Reason.AUTOSCALER_ACTIVE,
        "HorizontalPodAutoscaler tiny sets replicas between 1 and 4",
    ),
    "autoscaler fails": (
        scaled(HPA, hpa(said("ScalingActive", "False", "InvalidMetricSourceType", "no such metric"))),
        T.SCALING_ACTIVE,
        "False",
        Reason.AUTOSCALER_NOT_READY,
        "InvalidMetricSourceType: no such metric",
    ),
    "autoscaler rests": (
        scaled(HPA, hpa(said("AbleToScale", "True"), said("ScalingActive", "False", "ScalingDisabled"))),
        T.SCALING_ACTIVE,
        "False",
        Reason.SCALED_TO_ZERO,
        "rests while replicas is 0",
    ),
    "no metrics": (
        scaled(
            HPA,
            hpa(
                said(
                    "ScalingActive",
                    "False",
                    "FailedGetResourceMetric",
                    "unable to fetch metrics: the server could not find the requested resource",
                )
            ),
        ),
        T.SCALING_ACTIVE,
        "False",
        Reason.METRICS_API_MISSING,
        "FailedGetResourceMetric",
    ),
    "Gateway listens": (
        gated(route(FINE), upstream("True", "Accepted"), parents=(front(),)),
        T.READY,
        "True",
        Reason.SERVING,
        "served by 1 pod",
    ),
    "Gateway does not listen": (
        gated(route(FINE), upstream("True", "Accepted"), parents=(front("False", "AddressNotAssigned"),)),
        T.READY,
        "False",
        Reason.GATEWAY_NOT_PROGRAMMED,
        "Gateway infra/edge: it is not Programmed: AddressNotAssigned: told by its controller",
    ),
    "Gateway says nothing yet": (
        gated(route(FINE), upstream("True", "Accepted"), parents=(front(None),)),
        T.GATEWAY_READY,
        "False",
        Reason.GATEWAY_NOT_PROGRAMMED,
        "not told yet",
    ),
    "claim for one node": (
        world(pool(replicas=2, engine={"cache": {"size": "10Gi"}})),
        T.WARNINGS,
        "True",
        Reason.CLAIM_NOT_SHAREABLE,
        "claim tiny-cache is ReadWriteOnce: all 2 pods must be on one node",
    ),
    "claim for one node, autoscaled": (
        world(pool(engine={"cache": {"size": "10Gi"}}, autoscaling=HPA)),
        T.WARNINGS,
        "True",
        Reason.CLAIM_NOT_SHAREABLE,
        "all 4 pods",
    ),
    "claim for one pod": (
        world(pool(engine={"cache": {"size": "10Gi", "accessModes": ["ReadWriteOncePod"]}})),
        T.WARNINGS,
        "True",
        Reason.CLAIM_NOT_SHAREABLE,
        "one pod at a time can have it, also while a rollout",
    ),
    "devices without work": (
        world(
            pool(
                model={"uri": "path:///m", "name": "tiny"},
                accelerator={"type": "nvidia", "count": 8},
                engine={"type": "vllm", "tensorParallel": 2},
            )
        ),
        T.WARNINGS,
        "True",
        Reason.DEVICES_UNUSED,
        "accelerator.count is 8, and the engine uses 6 fewer",
    ),
    "no KEDA": (scaled(KEDA), T.SCALING_ACTIVE, "False", Reason.KEDA_MISSING, "keda.sh/v1alpha1"),
    "KEDA works": (
        scaled(KEDA, keda(said("Ready", "True"), said("Active", "False")), platform=WITH_KEDA),
        T.SCALING_ACTIVE,
        "True",
        Reason.AUTOSCALER_ACTIVE,
        "between 0 and 4",
    ),
}


@pytest.mark.parametrize(("seen", "kind", "status", "reason", "text"), STATES.values(), ids=STATES)
def test_a_state_has_its_name(seen, kind, status, reason, text):
    condition = conditions(pool_status(seen, PROGRESS))[kind]
    assert (condition["status"], condition["reason"]) == (status, reason), condition["message"]
    assert text in condition["message"]
    assert condition["message"].endswith(reason.fix)
    check_whole(seen, PROGRESS)


@pytest.mark.parametrize("name", TROUBLES)
def test_what_keeps_a_pod_from_being_ready_is_what_the_pool_says(name):
    status, events, reason, text = TROUBLES[name]
    seen = troubled(status, events)
    told = conditions(pool_status(seen))
    if status.get("phase") == "Failed":  # such a pod is nobody's any more; its Deployment makes another
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
def test_pods_that_cannot_be_made_are_told_of(reason):
    failed = said("ReplicaFailure", "True", "FailedCreate", REJECTIONS[reason])
    seen = world(children=(revision(pool(), 1, 0, conditions=[failed]),), pods=(), picker=view(pool()))
    assert conditions(pool_status(seen))[T.READY]["reason"] == reason
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
        "selector": "treeline.dev/component=runtime,treeline.dev/pool=tiny,treeline.dev/serving=true",
        "url": "http://treeline-gateway.shop.svc",
        "modelName": "big",
        "revision": revision_name,
        "replicaSummary": "2/2",
        "templateVersion": TEMPLATE_VERSION,
        "endpoints": [
            {"name": "tiny-1", "address": "10.0.0.1:8000", "ready": True, "serving": True},
            {"name": "tiny-2", "address": "10.0.0.2:8000", "ready": True, "serving": True},
        ],
        "gateway": {"name": "treeline", "epp": "treeline-epp", "owner": "tiny"},
    }


def test_a_pod_serves_when_the_picker_would_choose_it():
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
    assert [(one["name"], one["ready"], one["serving"]) for one in status["endpoints"]] == [
        ("tiny-1", True, True),
        ("tiny-2", True, False),
        ("tiny-3", True, False),
        ("tiny-4", False, False),
    ]
    assert status["endpoints"][3]["address"] == "[fd00::4]:8000"
    assert (status["replicas"], status["readyReplicas"]) == (4, 2)
    unasked = dataclasses.replace(seen, picker=None)
    assert [one["serving"] for one in pool_status(unasked)["endpoints"]] == [True, True, False, False]


def drains(number: int, since: str, **meta: Any) -> Observed:
    made = pod(pool(), f"tiny-{number}", serving="false", **ready(number)).object
    made["metadata"] |= {"annotations": {names.DRAINING_SINCE: since}, **meta}
    return Observed.of(made)


def test_who_drains_is_told_with_what_is_left_and_until_when():
    stays = pod(pool(), "tiny-1", **ready())
    since = "2026-11-20T11:59:50.000Z"
    counts = {"tiny-1": 7, "tiny-2": 2, "tiny-3": 1}
    listed = tuple(PickerEndpoint(n, n, n == "tiny-1", n != "tiny-1", c) for n, c in counts.items())
    picker = PickerView(True, {"tiny": listed}, {"tiny": ("tiny",)})
    seen = world(pods=(stays, drains(2, since), drains(3, "2026-11-20T11:59:30.000Z")), picker=picker)
    told = conditions(pool_status(seen))["Progressing"]
    text = "finishing their requests: 2 pods, 3 requests left, until 2026-11-20T12:00:50Z at the latest"
    assert text in told["message"]
    ends = drains(3, since, deletionTimestamp="2026-11-20T12:01:05Z")
    told = conditions(pool_status(world(pods=(stays, ends), picker=picker)))["Progressing"]
    assert "1 pod, 1 request left, until 2026-11-20T12:01:05Z at the latest" in told["message"]
    assert told["reason"] == "Draining"


def test_a_rollout_says_who_drains():
    seen = rolling(target_ready=1)
    extra = drains(9, "2026-11-20T11:59:50.000Z")
    told = conditions(pool_status(dataclasses.replace(seen, pods=(*seen.pods, extra))))["Progressing"]
    assert (told["reason"], told["status"]) == ("RollingOut", "True")
    assert "finishing their requests: 1 pod, until 2026-11-20T12:00:50Z at the latest" in told["message"]


def test_endpoints_are_no_more_than_fifty():
    mine = pool(replicas=60)
    status = pool_status(world(mine))
    assert len(status["endpoints"]) == MAX_ENDPOINTS
    assert (status["replicas"], status["readyReplicas"]) == (60, 60)


def test_downloads_are_added_up():
    mine = pool(replicas=2)
    there = tuple(pod(mine, f"tiny-{n}", **init(RUNNING)) for n in (1, 2))
    seen = world(mine, pods=there, picker=view(mine))
    told = {"tiny-1": (10, 100), "tiny-2": (50, 100), "other": (1, 1)}
    assert pool_status(seen, told)["download"] == {"percent": 30, "bytesDone": 60, "bytesTotal": 200}
    assert "download" not in pool_status(seen, {"tiny-1": (10, 0)})
    assert "download" not in pool_status(seen)
    assert "download" not in pool_status(world(mine), told)


def test_the_load_balancers_address_is_the_url_once_it_is_known():
    address = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
    seen = world(BALANCED, gateway_parts=gateway_children(service=address))
    status = pool_status(seen)
    assert status["url"] == "http://192.0.2.7:8080"
    assert conditions(status)[T.GATEWAY_READY]["status"] == "True"


def test_a_conflict_is_told_without_denying_that_requests_succeed():
    seen = world(LATE, others=(pool("older"),), picker=view(LATE, "late-1"))
    told = conditions(pool_status(seen))[T.READY]
    assert told["status"] == "True"
    assert "endpointPicker.policy is random here" in told["message"]
    assert pool_status(seen)["gateway"]["owner"] == "older"


def front_parts(revision, *, overdue=False):
    """A gateway whose Envoy is to have a configuration, and has one ready pod, of whichever."""
    late = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    picker, _, service = gateway_children()
    made = deployment("treeline-edge", 1, 1, conditions=late if overdue else ()).object
    made["spec"]["template"] = {"metadata": {"labels": {names.REVISION: revision}}}
    return picker, Observed.of(made), service


def envoy_pod(name, revision, **status):
    marks = {names.COMPONENT: "edge", names.REVISION: revision}
    return observed("Pod", name, meta={"labels": marks, "uid": f"uid-{name}"}, status=status)


def test_envoys_with_former_settings_are_not_what_was_asked_for():
    """With TLS or API keys switched on, status.url or the keys would not be those of who answers."""
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
    check_whole(seen)
    found = conditions(pool_status(seen))[T.READY]
    assert (found["status"], found["reason"]) == ("False", Reason.CONFIG_ERROR)
    assert "treeline-edge (pods with former settings serve meanwhile)" in found["message"]
    assert 'secret "certificate" not found' in found["message"]
    served = world(
        gateway_parts=front_parts("now"),
        gateway_pods=(old, envoy_pod("treeline-edge-new", "now", **ready(2))),
    )
    assert conditions(pool_status(served))[T.READY]["status"] == "True"
    left = conditions(pool_status(served))[T.PROGRESSING]
    assert (left["status"], left["reason"]) == ("True", Reason.ROLLING_OUT)
    assert "left of Envoys with former settings: 1 pod" in left["message"]
    gone = envoy_pod("treeline-edge-old", "before", phase="Succeeded")
    over = world(
        gateway_parts=front_parts("now"),
        gateway_pods=(gone, envoy_pod("treeline-edge-new", "now", **ready(2))),
    )
    assert conditions(pool_status(over))[T.PROGRESSING]["reason"] == Reason.ROLLOUT_COMPLETE


def test_envoys_that_never_come_to_their_settings_are_told_of():
    stuck = {"containerStatuses": [container("envoy", {"waiting": {"reason": "InvalidImageName"}})]}
    old, new = envoy_pod("edge-old", "now", **ready()), envoy_pod("edge-new", "now", **stuck)
    rolling = world(gateway_parts=front_parts("now"), gateway_pods=(old, new))
    assert conditions(pool_status(rolling))[T.READY]["status"] == "True", "they are the same to clients"
    late = world(gateway_parts=front_parts("now", overdue=True), gateway_pods=(old, new))
    found = conditions(pool_status(late))[T.GATEWAY_READY]
    assert (found["status"], found["reason"]) == ("False", Reason.IMAGE_PULL_FAILING)


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


def test_what_needs_somebody_is_told_before_what_passes():
    """The pods only start, but Envoy's image is wrong."""
    status = {"containerStatuses": [container("envoy", {"waiting": {"reason": "InvalidImageName"}})]}
    meta = {"labels": {names.COMPONENT: "edge"}}
    seen = world(
        pods=(pod(pool(), "tiny-1"),),
        gateway_parts=gateway_children(edge=0),
        gateway_pods=(observed("Pod", "treeline-edge-1", meta=meta, status=status),),
    )
    told = conditions(pool_status(seen))
    assert told[T.WORKLOADS_READY]["reason"] == Reason.PODS_STARTING
    assert told[T.READY]["reason"] == Reason.IMAGE_PULL_FAILING


def test_a_refused_write_is_told_where_it_matters():
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
    told = conditions(pool_status(seen))
    assert told[T.WORKLOADS_READY]["status"] == "False"
    assert told[T.PROGRESSING]["status"] == "True"


def test_a_spec_that_is_not_understood_keeps_the_figures_and_drops_stale_conditions():
    before = pool_status(world())
    obj = {"metadata": {"name": "tiny", "generation": 9}, "status": before}
    status = not_understood(obj, "spec.engine.type: Input should be 'treeline'", LATER, T.READY)
    (told,) = status["conditions"]
    assert (told["type"], told["status"], told["reason"]) == ("Ready", "False", Reason.SPEC_NOT_UNDERSTOOD)
    assert "Upgrade the operator" in told["message"]
    assert told["observedGeneration"] == status["observedGeneration"] == 9
    assert status["selector"] == before["selector"]
    again = not_understood({**obj, "status": status}, "spec.engine.type: Input should be 'treeline'", LATER, T.READY)
    assert again == status


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
        found = conditions(pool_status(seen))[T.READY]
        assert found["status"] == status, found
        assert (status == "True") or "listener https is not Programmed: Invalid: no certificate" in found["message"]


def test_conditions_that_have_no_meaning_any_more_are_gone():
    before = pool_status(scaled(HPA))
    assert T.SCALING_ACTIVE in conditions(before)
    after = conditions(pool_status(with_status(world(), before)))
    assert T.SCALING_ACTIVE not in after
    assert T.SECURITY_EXCEPTIONS not in after
    assert T.ROUTE_ACCEPTED not in after


ELSEWHERE = {
    # tested by name in this file and beside it
    Reason.SPEC_NOT_UNDERSTOOD,
    Reason.RECONCILE_FAILED,
    Reason.ACCEPTED,
    Reason.POOL_NOT_FOUND,
    Reason.MODEL_NAME_IN_USE,
    Reason.WEIGHTS_INVALID,
    # Events of the operator's own deeds
    Reason.CREATED,
    Reason.APPLIED,
    Reason.SCALED,
    Reason.DELETED,
    Reason.DRIFT_CORRECTED,
    Reason.DRAIN_CANCELLED,
    Reason.DRAIN_TIMEOUT,
}
NEVER = {
    # said by the absence of ScalingActive and SecurityExceptions
    Reason.NOT_AUTOSCALED,
    Reason.POD_SECURITY_RESTRICTED,
}


def test_every_reason_comes_from_some_state():
    produced = {reason for *_, reason, _ in STATES.values()} | {reason for _, _, reason, _ in TROUBLES.values()}
    produced |= set(REJECTIONS)
    assert produced | ELSEWHERE | NEVER == set(Reason)
    assert not produced & (ELSEWHERE | NEVER)
