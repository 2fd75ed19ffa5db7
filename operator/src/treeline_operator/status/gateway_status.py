"""Status of a pool's picker, gateway and route."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from treeline_operator import names
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.gateway import ParentRef
from treeline_operator.plan import edge, epp
from treeline_operator.plan import revision as revisions
from treeline_operator.plan.facts import annotation, condition_of, find, is_available, is_overdue, label, since
from treeline_operator.plan.gateway import gateway_url
from treeline_operator.plan.gateway_common import GatewayContext
from treeline_operator.plan.model_names import lost_names, names_of
from treeline_operator.plan.routes import ROUTE, UPSTREAM
from treeline_operator.plan.shared_gateway import SharedGateway
from treeline_operator.status.causes import diagnose
from treeline_operator.status.conditions import Judgement, few
from treeline_operator.world import Observed, PickerView, PoolWorld, Ref

_ROUTE_APIS: Final = ((ROUTE, Reason.GATEWAY_API_MISSING), (UPSTREAM, Reason.INFERENCE_EXTENSION_MISSING))
NORMAL_START_S: Final = 60
"""Seconds that pods of a picker or an Envoy may be unready after creation or failure before this counts as a
problem."""
UNHEARD_S: Final = 30
"""Seconds for which a picker counts as healthy without an answer: the operator may have just started, or an answer was
lost."""
GATEWAY_GROUP: Final = "gateway.networking.k8s.io"
_SERVICE_NAME: Final = "kubernetes.io/service-name"
_PROGRAMMED: Final = "Programmed"
_UNSUPPORTED: Final = frozenset(("NotSupportedByParent", "NotSupportedByGateway", "UnsupportedValue", "InvalidKind"))


def picker(world: PoolWorld, ready: Collection[str]) -> Judgement:
    """Whether a picker is ready and would choose these pods, the ready ones of the current revision."""
    deployment = names.epp(world.gateway.name)
    trouble = _component(world, deployment, "epp", Reason.PICKER_NOT_READY)
    if trouble is not None:
        return trouble
    if world.picker is None and _was_well(world):
        return "True", Reason.PICKER_SYNCED, f"{deployment} is ready; its list of pods is requested again"
    if world.picker is None:
        return "Unknown", Reason.PICKER_UNREACHABLE, f"no pod of {deployment} has reported its list of pods"
    if not world.picker.synced:
        return "False", Reason.PICKER_NOT_SYNCED, f"{deployment} has not read the cluster yet"
    listed = revisions.routable(world.picker, world.pool.name) or frozenset()
    missing = sorted(set(ready) - listed)
    if missing:
        text = f"{deployment} would choose {len(ready) - len(missing)} of {len(ready)} ready pods, not {few(missing)}"
        return "False", Reason.ENDPOINTS_MISSING, text
    text = f"{deployment} would choose every ready pod ({len(ready)})" if ready else f"{deployment} is ready"
    return "True", Reason.PICKER_SYNCED, text + _routing(world.picker, world.pool.name)


def _routing(picker: PickerView, pool: str) -> str:
    """By which way the picker finds cached prefixes; nothing where it does not say, as an older one."""
    routing = picker.routing.get(pool)
    return "" if routing is None else f"; prefixes are found by {': '.join(filter(None, routing))}"


def _was_well(world: PoolWorld) -> bool:
    """Whether the picker was healthy at its last report, a short time ago."""
    reported = condition_of({"status": world.pool.status}, ConditionType.ENDPOINT_PICKER_READY)
    silent = world.picker_silent_since
    lately = silent is None or (world.now - silent).total_seconds() < UNHEARD_S
    return reported.get("status") == "True" and lately


def gateway(world: PoolWorld, shared: SharedGateway) -> Judgement:
    """Whether the pool's gateway takes requests."""
    trouble = _standalone(world, shared) if shared.mode == "standalone" else _gateway_api(world, shared)
    if trouble is not None:
        return trouble
    if former := _former_settings(world, shared):
        text = f"Deployment {former} gets new settings; pods with former settings serve meanwhile"
        return "False", Reason.PENDING, text
    otherwise: list[tuple[Reason, str]] = []
    if shared.retained:
        text = f"it keeps protections of a deleted pool: {', '.join(shared.retained)}; gateway.unprotected drops it"
        otherwise.append((Reason.PROTECTION_RETAINED, text))
    otherwise += ((Reason.GATEWAY_CONFLICT, text) for text in shared.conflicts_of(world.pool))
    lost = lost_names(world.pool, names_of(world.gateway.models, world.gateway.pools))
    otherwise += ((Reason.MODEL_NAME_IN_USE, text) for text in lost)
    if otherwise:
        told = "; ".join(text for _, text in otherwise)
        return "True", otherwise[0][0], f"the gateway serves, but with other settings than this pool's: {told}"
    if (found := caution(shared)) is not None:
        return "True", *found
    if shared.mode == "standalone":
        text = f"gateway {shared.name} is ready"
    else:
        text = f"{few(map(_parent_name, parents(world, shared)))} has the route"
    return "True", Reason.GATEWAY_SERVING, text


def caution(shared: SharedGateway) -> tuple[Reason, str] | None:
    """Warnings about a gateway that serves."""
    if shared.mode != "standalone":
        return None
    settings = shared.edge
    wanting = {"apiKeysSecretRef": settings.api_keys_secret_ref, "tls": settings.tls}
    lacks = " and no ".join(name for name, there in wanting.items() if there is None)
    if settings.service_type == "LoadBalancer" and lacks:
        return Reason.GATEWAY_OPEN, f"gateway {shared.name} is ready; its load balancer has no {lacks}"
    if shared.salts and shared.failure_mode == "FailOpen":
        text = f"gateway {shared.name} is ready; it refuses requests while no picker answers, since isolation is PerKey"
        return Reason.FAIL_CLOSE_FORCED, text
    return None


def route(world: PoolWorld, shared: SharedGateway) -> Judgement | None:
    """Whether every parent accepts the pool's HTTPRoute and its upstream pool; None without Gateway API."""
    if shared.mode == "standalone" or _missing_api(world) is not None:
        return None
    found = list(_judgements(world, shared))
    for who, condition in found:
        if condition is not None and condition["status"] == "False":
            why = condition.get("reason")
            reason = Reason.UNSUPPORTED_BY_PARENT if why in _UNSUPPORTED else Reason.ROUTE_NOT_ACCEPTED
            return (
                "False",
                reason,
                f"{who}: {condition['type']} is False, {why}: {condition.get('message', '')}",
            )
    waiting = [who for who, condition in found if condition is None or condition["status"] != "True"]
    if waiting or not found:
        text = f"not processed yet: {few(waiting)}" if waiting else "the HTTPRoute is not there yet"
        return "Unknown", Reason.ROUTE_PENDING, text
    accepted = few(map(_parent_name, parents(world, shared)))
    return "True", Reason.ROUTE_ACCEPTED, f"accepted by {accepted}"


def url(world: PoolWorld, shared: SharedGateway) -> str:
    """The URL for the pool's model; empty if it cannot be known."""
    own = world.pool if shared.mode == "standalone" or world.pool.spec.gateway.hostnames else None
    return gateway_url(world.gateway, own) or ""


def parents(world: PoolWorld, shared: SharedGateway) -> tuple[ParentRef, ...]:
    """The Gateways that the pool is attached to."""
    return world.pool.spec.gateway.parent_refs or shared.owner.spec.gateway.parent_refs


def _component(
    world: PoolWorld, name: str, component: str, not_ready: Reason, *, serves: bool | None = None
) -> Judgement | None:
    """Why a Deployment of the gateway has no ready pod; None if it has one, or `serves` is set."""
    found = find(world.gateway.children, "Deployment", name)
    if found is None:
        return "False", Reason.PENDING, f"Deployment {name} is not there yet"
    deployment = found.object
    pods = _pods_of(world, component)
    if serves is None:
        serves = bool((deployment.get("status") or {}).get("readyReplicas"))
    if serves and _is_of_now(deployment, pods):
        return None
    causes = diagnose(pods, [deployment], world.events)
    if serves:
        name = f"{name} (pods with former settings serve meanwhile)"
    if not causes:
        return "False", Reason.PODS_STARTING, f"Deployment {name} {'gets new ones' if serves else 'has no pods yet'}"
    reason = causes[0].reason
    if reason is Reason.PROBE_FAILING:
        lasts = any(_unready_s(pod, world.now) >= NORMAL_START_S for pod in pods if not is_available(pod))
        reason = not_ready if lasts else Reason.PODS_STARTING
    elif reason is Reason.MODEL_LOADING:  # the cause of any container that has not passed its start-up probe
        reason = Reason.PODS_STARTING
    return "False", reason, f"Deployment {name}: {causes[0].detail}"


def _unready_s(pod: Mapping[str, Any], now: datetime) -> float:
    """Seconds since a pod became unready; infinite if unknown."""
    begun = since(pod, "Ready")
    return (now - begun).total_seconds() if begun is not None else float("inf")


def former_envoys(world: PoolWorld) -> int:
    """The number of Envoys with previous settings: while they end they finish their requests, and do not check keys
    that only the new settings require."""
    found = find(world.gateway.children, "Deployment", names.edge(world.gateway.name))
    if found is None or (wanted := _configuration(found.object)) is None:
        return 0
    pods = _pods_of(world, "edge")
    running = (pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"))
    return sum(label(pod, names.REVISION) not in ("", wanted) for pod in running)


def _pods_of(world: PoolWorld, component: str) -> list[Mapping[str, Any]]:
    """The gateway's pods of a component, ending ones included."""
    return [pod for pod in _objects(world.gateway.pods) if label(pod, names.COMPONENT) == component]


def _configuration(deployment: Mapping[str, Any]) -> str | None:
    """The hash of the configuration that a Deployment's pods should have, for configuration that clients notice."""
    template = deployment["spec"].get("template") or {}
    wanted: str | None = template.get("metadata", {}).get("labels", {}).get(names.REVISION)
    return wanted


def _is_of_now(deployment: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the serving pods have the requested settings. Pods carry the hash of configuration that clients notice
    (Envoy's: TLS, API keys), and any ready pod may be asked; other changes only need to complete."""
    wanted = _configuration(deployment)
    ready = {label(pod, names.REVISION) for pod in pods if is_available(pod)}
    return not is_overdue(deployment) and (wanted is None or ready == {wanted})


def _former_settings(world: PoolWorld, shared: SharedGateway) -> str:
    """The Deployment that still has the pools' previous settings; empty if none. The gateway is planned separately and
    may be late.

    The picker's is compared only after a change of this pool's spec: comparing costs as much as the gateway has pools,
    and would slow every pool's status.
    """
    pool, context = world.pool, GatewayContext.of(replace(world.gateway, pools=shared.members), shared, "")
    reported = condition_of({"status": pool.status}, ConditionType.GATEWAY_READY)
    is_news = pool.status.get("observedGeneration") != pool.metadata.generation or reported.get("status") != "True"
    wanted = {names.edge(shared.name): edge.inputs} if shared.mode == "standalone" else {}
    wanted |= {names.epp(shared.name): epp.inputs} if is_news else {}
    for name, inputs in wanted.items():
        found = find(world.gateway.children, "Deployment", name)
        there = annotation(found.object, names.INPUTS) if found is not None else ""
        if there not in ("", inputs(context)):
            return name
    return ""


def _standalone(world: PoolWorld, shared: SharedGateway) -> Judgement | None:
    service_name = names.url_service(shared.name)
    service = find(world.gateway.children, "Service", service_name)
    answers = _answers(world, service_name)
    ready = any(is_available(pod) for pod in _pods_of(world, "edge"))
    # Ready pods outside the Service are not a problem of the Deployment.
    trouble = _component(world, names.edge(shared.name), "edge", Reason.GATEWAY_NOT_READY, serves=answers or ready)
    if trouble is not None:
        return trouble
    if service is None:
        return "False", Reason.PENDING, f"Service {service_name} is not there yet"
    if not any(port.get("port") == shared.edge.port for port in service.object["spec"].get("ports") or ()):
        text = f"Service {service_name} has no port {shared.edge.port}; the operator corrects it"
        return "False", Reason.GATEWAY_NOT_READY, text
    if not answers:
        text = f"Service {service_name} has no ready Envoy in its EndpointSlices"
        return "False", Reason.GATEWAY_NOT_READY, text
    balancer = (service.object.get("status") or {}).get("loadBalancer") or {}
    if shared.edge.service_type == "LoadBalancer" and not balancer.get("ingress"):
        inside = f"{service_name}.{world.pool.namespace}.svc"
        text = f"Service {service_name} waits for an external address; inside the cluster {inside} serves"
        return "False", Reason.ADDRESS_PENDING, text
    return None


def _answers(world: PoolWorld, service: str) -> bool:
    """Whether a Service has ready endpoints, by its EndpointSlices."""
    slices = (child for child in world.gateway.children if child.ref.kind == "EndpointSlice")
    return any(
        slice_.get("ports") and (endpoint.get("conditions") or {}).get("ready") is not False
        for slice_ in _objects(slices)
        if label(slice_, _SERVICE_NAME) == service
        for endpoint in slice_.get("endpoints") or ()
    )


def _gateway_api(world: PoolWorld, shared: SharedGateway) -> Judgement | None:
    if (missing := _missing_api(world)) is not None:
        return "False", *missing
    silent = [who for who, condition in _judgements(world, shared) if condition is None]
    there = any(child.ref.kind == "HTTPRoute" for child in world.children)
    if silent or not there:
        text = f"no report yet: {few(silent)}" if silent else "the HTTPRoute is not there yet"
        return "Unknown", Reason.ROUTE_PENDING, text
    return _unprogrammed(world, shared)


def _unprogrammed(world: PoolWorld, shared: SharedGateway) -> Judgement | None:
    """Return what a readable Gateway reports if its data plane is not ready; None if all are ready.

    A route may be accepted long before, by the controller, which serves no requests.
    """
    known = {(one.ref.namespace, one.ref.name): one.object for one in world.parents}
    for ref in parents(world, shared):
        found = known.get((ref.namespace or world.pool.namespace, ref.name)) if ref.kind == "Gateway" else None
        if found is None:
            continue
        for whose, condition in _programmed(found, ref):
            if condition.get("status") == "True":
                continue
            reported = f"{condition.get('reason')}: {condition.get('message', '')}" if condition else "not reported yet"
            text = f"{_parent_name(ref)}: {whose} is not {_PROGRAMMED}: {reported}"
            return "False", Reason.GATEWAY_NOT_PROGRAMMED, text
    return None


def _programmed(gateway: Mapping[str, Any], ref: ParentRef) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The condition of a Gateway, and of the listener that the pool is attached to; empty where it is not reported."""
    yield "it", condition_of(gateway, _PROGRAMMED)
    for listener in (gateway.get("status") or {}).get("listeners") or ():
        if listener["name"] == ref.section_name:
            yield f"listener {listener['name']}", condition_of({"status": listener}, _PROGRAMMED)


def gateway_refs(world: PoolWorld, shared: SharedGateway) -> tuple[Ref, ...]:
    """The Gateways among the pool's parents."""
    if shared.mode == "standalone" or _missing_api(world) is not None:
        return ()
    found = (ref for ref in parents(world, shared) if (ref.group, ref.kind) == (GATEWAY_GROUP, "Gateway"))
    spaces = ((ref.namespace or world.pool.namespace, ref.name) for ref in found)
    return tuple(Ref(f"{GATEWAY_GROUP}/v1", "Gateway", *space) for space in dict.fromkeys(spaces))


def _missing_api(world: PoolWorld) -> tuple[Reason, str] | None:
    lacking = ((reason, world.platform.lacking(api)) for api, reason in _ROUTE_APIS)
    return next(((reason, text) for reason, text in lacking if text), None)


def _judgements(world: PoolWorld, shared: SharedGateway) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Conditions by parent: of the HTTPRoute, one or None for each; of the upstream pool where present."""
    for obj in _objects(child for child in world.children if child.ref.kind == "HTTPRoute"):
        reported = (obj.get("status") or {}).get("parents") or ()
        for ref in parents(world, shared):
            own = [entry for entry in reported if _is_about(entry.get("parentRef") or {}, ref, world.pool.namespace)]
            yield _parent_name(ref), _worst(obj, own)
    for obj in _objects(child for child in world.children if _is_upstream(child)):
        for entry in (obj.get("status") or {}).get("parents") or ():
            who = entry.get("parentRef") or {}
            if who.get("kind", "Gateway") != "Status":  # a placeholder that older versions of the CRD put there
                yield f"{who.get('kind', 'Gateway')} {who.get('name')}, of the pool", _worst(obj, [entry])


def _worst(obj: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The decisive condition: a False one, else an unknown one, else a True one. None without any."""
    generation = obj["metadata"].get("generation", 0)
    reported = [
        condition
        for entry in entries
        for condition in entry.get("conditions") or ()
        if condition["type"] in ("Accepted", "ResolvedRefs")
        and condition.get("observedGeneration", generation) >= generation
    ]
    return min(reported, key=lambda one: ("False", "Unknown", "True").index(one["status"]), default=None)


def _is_about(said: Mapping[str, Any], ref: ParentRef, namespace: str) -> bool:
    return (
        said.get("name") == ref.name
        and said.get("kind", "Gateway") == ref.kind
        and said.get("namespace", namespace) == (ref.namespace or namespace)
        and said.get("sectionName") == ref.section_name
        and said.get("port") == ref.port
    )


def _is_upstream(child: Observed) -> bool:
    return child.ref.kind == "InferencePool" and child.ref.api_version.startswith("inference.networking.")


def _parent_name(ref: ParentRef) -> str:
    place = f"{ref.namespace}/{ref.name}" if ref.namespace else ref.name
    return f"{ref.kind} {place}" + (f" ({ref.section_name})" if ref.section_name else "")


def _objects(observed: Iterable[Observed]) -> list[dict[str, Any]]:
    return [one.object for one in observed]
