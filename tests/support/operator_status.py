"""Worlds for tests of the operator's status: a serving pool, and changes of it."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.revision import target_revision
from treeline_operator.plan.runtime import workload as rendered
from treeline_operator.status.conditions import same_status
from treeline_operator.status.pool import pool_status
from treeline_operator.world import (
    Event,
    GatewayWorld,
    Images,
    Observed,
    PickerEndpoint,
    PickerView,
    Platform,
    PoolWorld,
)
from treeline_wire import labels

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5)
_uids = itertools.count(1)


def pool(
    name: str = "tiny", /, *, generation: int = 3, created: str = "2026-11-01T00:00:00Z", **spec: Any
) -> InferencePool:
    """Return a pool of the builtin model; keywords are fields of its spec, in camelCase."""
    meta = {"name": name, "namespace": "shop", "uid": f"uid-{name}", "generation": generation}
    return InferencePool.from_object(
        {
            "apiVersion": "treeline.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {**meta, "creationTimestamp": created},
            "spec": {"model": {"uri": "builtin://tiny"}, **spec},
        },
        strict=True,
    )


def model(
    name: str, /, *, model_name: str = "chat", created: str = "2026-11-01T00:00:00Z", **spec: Any
) -> InferenceModel:
    """Return an InferenceModel of pool tiny; keywords are fields of its spec, in camelCase."""
    meta = {"name": name, "namespace": "shop", "uid": f"uid-{name}", "generation": 2}
    return InferenceModel.from_object(
        {
            "apiVersion": "treeline.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {**meta, "creationTimestamp": created},
            "spec": {"modelName": model_name, "poolRef": {"name": "tiny"}, **spec},
        },
        strict=True,
    )


def observed(kind: str, name: str, api_version: str = "v1", **fields: Any) -> Observed:
    """Return an object of namespace shop. ``meta`` is added to its metadata."""
    meta = {"name": name, "namespace": "shop", "uid": f"uid-{name}", "resourceVersion": "7", "generation": 1}
    meta |= fields.pop("meta", {})
    return Observed.of({"apiVersion": api_version, "kind": kind, "metadata": meta, **fields})


def deployment(name: str, replicas: int, ready: int, *, conditions: Any = ()) -> Observed:
    """Return a Deployment that its controller has observed."""
    status = _deployed(replicas, ready, conditions)
    return observed("Deployment", name, "apps/v1", spec={"replicas": replicas}, status=status)


def revision(of: InferencePool, replicas: int, ready: int, *, conditions: Any = ()) -> Observed:
    """Return the Deployment of the pool's current revision, as the planner makes it."""
    wanted = target_revision(of, ())
    name = names.deployment(of.name, wanted.name)
    meta = {
        "name": name,
        "namespace": "shop",
        "uid": f"uid-{name}",
        "generation": 1,
        "labels": {labels.POOL: of.name, names.MANAGED_BY: names.MANAGER},
        "creationTimestamp": "2026-11-20T11:00:00Z",
        "ownerReferences": [of.owner_reference(controller=True)],
    }
    made = rendered(of, wanted, replicas, meta, Images())
    return Observed.of({**made, "status": _deployed(replicas, ready, conditions)})


def _deployed(replicas: int, ready: int, conditions: Any) -> dict[str, Any]:
    return {
        "observedGeneration": 1,
        "replicas": replicas,
        "readyReplicas": ready,
        "conditions": list(conditions),
    }


def pod(
    of: InferencePool,
    name: str,
    *,
    revision: str = "",
    serving: str = "true",
    deleting: bool = False,
    **status: Any,
) -> Observed:
    """Return a pod of the pool; keywords are fields of its status. Without any, no controller has touched it."""
    marks = {
        labels.POOL: of.name,
        labels.SERVING: serving,
        names.COMPONENT: "runtime",
        names.REVISION: revision or target_revision(of, ()).name,
    }
    meta: dict[str, Any] = {"labels": marks, "uid": f"uid-{name}"}
    if deleting:
        meta["deletionTimestamp"] = "2026-11-20T11:59:00Z"
    return observed("Pod", name, meta=meta, status=status)


def ready(number: int = 1) -> dict[str, Any]:
    """Return the status of a ready pod."""
    return {
        "phase": "Running",
        "podIP": f"10.0.0.{number}",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
        "containerStatuses": [container("runtime", {"running": {}}, ready=True)],
    }


def container(name: str, state: Any, **fields: Any) -> dict[str, Any]:
    """Return the status of one container."""
    return {
        "name": name,
        "image": "registry.example/runtime:1",
        "ready": False,
        "restartCount": 0,
        "state": state,
        **fields,
    }


def event(about: str, reason: str, message: str, *, last: str = "2026-11-20T11:59:00Z") -> Event:
    """Return a Warning event."""
    return Event(reason, message, last, about, f"uid-{about}")


def gateway_children(
    name: str = "treeline", *, epp: int = 1, edge: int = 1, service: Any = None
) -> tuple[Observed, ...]:
    """Return picker and Envoy with this many ready pods, and the Service in front."""
    url = names.url_service(name)
    ports = [{"name": "http", "port": 80}, {"name": "https", "port": 443}, {"name": "other", "port": 8080}]
    front = observed("Service", url, status=service or {}, spec={"ports": ports})
    ready = [{"addresses": [f"10.1.0.{n}"], "conditions": {"ready": True}} for n in range(edge)]
    meta = {"labels": {"kubernetes.io/service-name": url}}
    slices = observed("EndpointSlice", f"{url}-x", meta=meta, endpoints=ready, ports=[{"name": "http", "port": 8080}])
    return (deployment(names.epp(name), 1, epp), deployment(names.edge(name), 1, edge), front, slices)


def view(of: InferencePool, *pods: str, models: tuple[str, ...] = ("tiny",), synced: bool = True) -> PickerView:
    """Return a picker's view that lists these pods."""
    listed = tuple(PickerEndpoint(name, f"10.0.0.{n}:8000", True) for n, name in enumerate(pods, start=1))
    return PickerView(synced, {of.name: listed}, {of.name: models})


def world(of: InferencePool | None = None, **changes: Any) -> PoolWorld:
    """Return the world of a pool that serves with all requested pods; keywords replace parts of this world, or of its
    gateway. ``others`` are the pools that share the gateway, ``gateway_parts`` its children and ``gateway_pods`` its
    pods."""
    mine = of if of is not None else pool()
    count = mine.spec.replicas
    platform = changes.pop("platform", Platform())
    gateway = GatewayWorld(
        namespace="shop",
        name=mine.spec.gateway.name,
        pools=(mine, *changes.pop("others", ())),
        children=changes.pop("gateway_parts", gateway_children(mine.spec.gateway.name)),
        pods=changes.pop("gateway_pods", ()),
        platform=platform,
        now=NOW,
    )
    children = changes.pop("children") if "children" in changes else (revision(mine, count, count),)
    whole = PoolWorld(
        pool=mine,
        children=children,
        pods=tuple(pod(mine, f"{mine.name}-{n}", **ready(n)) for n in range(1, count + 1)),
        gateway=gateway,
        picker=view(mine, *(f"{mine.name}-{n}" for n in range(1, count + 1))),
        platform=platform,
        now=NOW,
    )
    return dataclasses.replace(whole, **changes)


def conditions(status: Any) -> dict[str, Any]:
    """Return the conditions of a status by type."""
    return {condition["type"]: condition for condition in status["conditions"]}


def check_whole(seen: PoolWorld, progress: Any = None) -> None:
    """Check the invariants of every status."""
    kinds = ConditionType
    status = pool_status(seen, progress)
    generation = seen.pool.metadata.generation
    told = conditions(status)
    assert len(told) == len(status["conditions"])
    assert status["observedGeneration"] == generation
    assert {condition["observedGeneration"] for condition in status["conditions"]} == {generation}
    assert [condition["type"] for condition in status["conditions"]] == sorted(told, key=list(ConditionType).index)
    assert all(Reason(condition["reason"]) for condition in status["conditions"])
    assert all("  " not in condition["message"] and ".." not in condition["message"] for condition in told.values())
    needed = {kinds.WORKLOADS_READY, kinds.MODEL_READY, kinds.ENDPOINT_PICKER_READY, kinds.GATEWAY_READY}
    assert needed <= set(told)
    needed |= {kinds.ROUTE_ACCEPTED} & set(told)
    well = all(told[kind]["status"] == "True" for kind in needed)
    pods_there = status["readyReplicas"] > 0 and seen.pool.spec.replicas > 0 and not seen.pool.deleting
    if well and pods_there:
        assert told[kinds.READY]["status"] == "True"
    if told[kinds.READY]["status"] == "True":
        assert pods_there
        way_in = [told[kind] for kind in needed - {kinds.WORKLOADS_READY}]
        assert all(one["status"] == "True" or one["reason"] == Reason.ENDPOINTS_MISSING for one in way_in)
    assert status["replicaSummary"] == f"{status['readyReplicas']}/{seen.pool.spec.replicas}"
    if well and told[kinds.PROGRESSING]["reason"] == Reason.ROLLOUT_COMPLETE:
        assert told[kinds.PROGRESSING]["status"] == kinds.PROGRESSING.polarity
    again = pool_status(with_status(seen, status), progress)
    assert again == status, "a status that is computed from itself is the same, transition times too"
    assert same_status(again, status)


def conditions_of(seen: PoolWorld, progress: Any = None) -> dict[str, Any]:
    """Return the conditions of the pool's status by type, after checking the whole status."""
    check_whole(seen, progress)
    return conditions(pool_status(seen, progress))


def with_status(seen: PoolWorld, status: Any, now: datetime = LATER) -> PoolWorld:
    """Return the same world, later, with a status."""
    mine = seen.pool.model_copy(update={"status": status})
    members = tuple(mine if other.name == mine.name else other for other in seen.gateway.pools)
    gateway = dataclasses.replace(seen.gateway, pools=members, now=now)
    return dataclasses.replace(seen, pool=mine, gateway=gateway, now=now)
