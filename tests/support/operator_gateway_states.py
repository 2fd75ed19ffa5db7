"""States of a pool's picker, gateway and routes, and the status that each leads to."""

from __future__ import annotations

from datetime import timedelta

from treeline_operator import names
from treeline_operator.plan.routes import ROUTE, UPSTREAM
from treeline_operator.world import Platform

from support.operator_status import (
    NOW,
    container,
    deployment,
    event,
    gateway_children,
    observed,
    pool,
    revision,
    view,
    world,
)
from support.operator_trouble import CREATING, RUNNING

GATED = pool(gateway={"parentRefs": [{"name": "edge", "namespace": "infra"}], "hostnames": ["llm.example"]})
BOTH_APIS = Platform(apis=frozenset((ROUTE, UPSTREAM)))


def route(*told, generation=1):
    """Return an HTTPRoute whose parents report (status, reason) pairs of the conditions Accepted and ResolvedRefs."""
    entries = [
        {
            "parentRef": {"group": "gateway.networking.k8s.io", "name": "edge", "namespace": "infra"},
            "controllerName": "example.com/controller",
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": "so it is", "observedGeneration": 1}
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
        {"parentRef": {"kind": "Status", "name": "default"}, "conditions": [{**condition, "status": "Unknown"}]},
        {"parentRef": {"name": "edge", "namespace": "infra"}, "conditions": [condition]},
    ]
    return observed("InferencePool", "tiny-gie", "inference.networking.k8s.io/v1", status={"parents": entries})


def front(status="True", reason="Programmed", listener="True"):
    """Return the Gateway that the pool is attached to, and whether it listens."""
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


KEYS = 'MountVolume.SetUp failed for volume "keys" : secret "treeline-kv-keys" not found'
BALANCER = {"serviceType": "LoadBalancer"}
KEYED = {"apiKeysSecretRef": {"name": "keys"}}
ADDRESS = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
SALTED = pool(model={"uri": "hf://o/n"}, engine={"type": "vllm"}, gateway={"standalone": KEYED})
RECORD = {"protections": '{"ApiKeys":{"secret":"clients","pools":["uid-of-one-that-is-gone"]}}'}
BALANCED = pool(gateway={"standalone": {"serviceType": "LoadBalancer", "port": 8080}})
LATE = pool("late", created="2026-11-02T00:00:00Z", endpointPicker={"replicas": 2})
UNHEALTHY = {"phase": "Running", "containerStatuses": [container("c", RUNNING, started=True)]}


CREATING_ONE = {"phase": "Pending", "containerStatuses": [container("c", CREATING)]}


def part_pod(component, status=UNHEALTHY):
    meta = {"labels": {names.COMPONENT: component}}
    return observed("Pod", f"treeline-{component}-1", meta=meta, status=status)


def unready(seconds):
    """Return the condition of a pod that has been unready for this long."""
    since = (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    return {"type": "Ready", "status": "False", "lastTransitionTime": since}


def part_event(component):
    return event(f"treeline-{component}-1", "Unhealthy", "Readiness probe failed: 503")


def gone_from(*kinds):
    return tuple(child for child in gateway_children() if child.ref.kind not in kinds)


# name: (world, condition with its status and reason, part of the message)
GATEWAY_STATES = {
    "picker": (world(), "EndpointPickerReady True PickerSynced", "every ready pod (1)"),
    "gateway": (world(), "GatewayReady True GatewayServing", "gateway treeline is ready"),
    "no picker yet": (
        world(gateway_parts=()),
        "EndpointPickerReady False Pending",
        "Deployment treeline-epp is not there yet",
    ),
    "picker starts": (
        world(gateway_parts=gateway_children(epp=0)),
        "EndpointPickerReady False PodsStarting",
        "has no pods yet",
    ),
    "picker is sick": (
        world(gateway_parts=gateway_children(epp=0), gateway_pods=(part_pod("epp"),), events=(part_event("epp"),)),
        "EndpointPickerReady False PickerNotReady",
        "Deployment treeline-epp: 1 of 1 pods (treeline-epp-1): container c runs, but: Readiness probe failed",
    ),
    "picker has no keys": (
        world(
            gateway_parts=gateway_children(epp=0),
            gateway_pods=(part_pod("epp", CREATING_ONE),),
            events=(event("treeline-epp-1", "FailedMount", KEYS),),
        ),
        "Ready False KeySecretMissing",
        "treeline-kv-keys",
    ),
    "picker not synced": (
        world(picker=view(pool(), "tiny-1", synced=False)),
        "Ready False PickerNotSynced",
        "has not read the cluster",
    ),
    "picker is silent": (world(picker=None), "Ready Unknown PickerUnreachable", "treeline-epp"),
    "picker lacks one": (
        world(pool(replicas=2), picker=view(pool(), "tiny-2")),
        "EndpointPickerReady False EndpointsMissing",
        "would choose 1 of 2 ready pods, not tiny-1",
    ),
    "picker lacks one, progress": (
        world(pool(replicas=2), picker=view(pool(), "tiny-2")),
        "Progressing True EndpointsMissing",
        "not tiny-1",
    ),
    "gateway is sick": (
        world(gateway_parts=gateway_children(edge=0), gateway_pods=(part_pod("edge"),), events=(part_event("edge"),)),
        "Ready False GatewayNotReady",
        "Deployment treeline-edge: ",
    ),
    "no service yet": (
        world(gateway_parts=gone_from("Service")),
        "GatewayReady False Pending",
        "Service treeline-gateway is not there yet",
    ),
    "no address": (
        world(BALANCED),
        "GatewayReady False AddressPending",
        "inside the cluster treeline-gateway.shop.svc serves",
    ),
    "conflict": (
        world(LATE, others=(pool("older"),)),
        "GatewayReady True GatewayConflict",
        "but with other settings than this pool's: endpointPicker.replicas is 2 here, 1 in pool older (older)",
    ),
    "keys of a pool that is gone": (
        world(gateway_parts=(*gateway_children(), observed("ConfigMap", "treeline-gateway", data=RECORD))),
        "GatewayReady True ProtectionRetained",
        "it keeps protections of a deleted pool: ApiKeys; gateway.unprotected drops it",
    ),
    "open to the world": (
        world(BALANCED, gateway_parts=gateway_children(service=ADDRESS)),
        "GatewayReady True GatewayOpen",
        "its load balancer has no apiKeysSecretRef and no tls",
    ),
    "keys in the clear": (
        world(pool(gateway={"standalone": BALANCER | KEYED}), gateway_parts=gateway_children(service=ADDRESS)),
        "GatewayReady True GatewayOpen",
        "its load balancer has no tls",
    ),
    "keys and certificate": (
        world(
            pool(gateway={"standalone": BALANCER | KEYED | {"tls": {"secretRef": {"name": "cert"}}}}),
            gateway_parts=gateway_children(service=ADDRESS),
        ),
        "GatewayReady True GatewayServing",
        "is ready",
    ),
    "clients kept apart by the picker alone": (
        world(SALTED),
        "GatewayReady True FailCloseForced",
        "it refuses requests while no picker answers",
    ),
    "no Gateway API": (
        gated(platform=Platform()),
        "Ready False GatewayApiMissing",
        "gateway.networking.k8s.io/v1/HTTPRoute",
    ),
    "no Inference Extension": (
        gated(platform=Platform(apis=frozenset((ROUTE,)))),
        "GatewayReady False InferenceExtensionMissing",
        "inference.networking.k8s.io/v1/InferencePool",
    ),
    "no route yet": (gated(), "RouteAccepted Unknown RoutePending", "is not there yet"),
    "route unjudged": (gated(route()), "Ready Unknown RoutePending", "Gateway infra/edge"),
    "route judged before": (gated(route(FINE, generation=2)), "Ready Unknown RoutePending", "infra/edge"),
    "route half judged": (
        gated(route((("True", "Accepted"), ("Unknown", "Pending")))),
        "RouteAccepted Unknown RoutePending",
        "not processed yet: Gateway infra/edge",
    ),
    "route accepted": (gated(route(FINE)), "RouteAccepted True RouteAccepted", "Gateway infra/edge"),
    "route serves": (gated(route(FINE)), "Ready True Serving", "at http://llm.example"),
    "route refused": (
        gated(route((("False", "NotAllowedByListeners"), ("True", "ResolvedRefs")))),
        "Ready False RouteNotAccepted",
        "Gateway infra/edge: Accepted is False, NotAllowedByListeners: so it is",
    ),
    "pools unsupported": (
        gated(route((("True", "Accepted"), ("False", "InvalidKind")))),
        "RouteAccepted False UnsupportedByParent",
        "ResolvedRefs is False, InvalidKind",
    ),
    "pool refused": (
        gated(route(FINE), upstream("False", "NotSupportedByParent")),
        "RouteAccepted False UnsupportedByParent",
        "Gateway edge, of the pool: Accepted is False",
    ),
    "pool accepted": (
        gated(route(FINE), upstream("True", "Accepted")),
        "RouteAccepted True RouteAccepted",
        "accepted by Gateway infra/edge",
    ),
    "Gateway listens": (
        gated(route(FINE), upstream("True", "Accepted"), parents=(front(),)),
        "Ready True Serving",
        "served by 1 pod",
    ),
    "Gateway does not listen": (
        gated(route(FINE), upstream("True", "Accepted"), parents=(front("False", "AddressNotAssigned"),)),
        "Ready False GatewayNotProgrammed",
        "Gateway infra/edge: it is not Programmed: AddressNotAssigned: told by its controller",
    ),
    "Gateway says nothing yet": (
        gated(route(FINE), upstream("True", "Accepted"), parents=(front(None),)),
        "GatewayReady False GatewayNotProgrammed",
        "not reported yet",
    ),
}
