"""The pods of a pool: the Deployment of one revision, from the spec and the user's fragment of a template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files, files, init_container
from treeline_operator.plan.engines import KEYS_DIR, Launch, launch, start_seconds
from treeline_operator.plan.merge import TemplateInvalid, merged
from treeline_operator.plan.pods import CONTAINER, DOWNLOAD
from treeline_operator.plan.revision import Existing, Target
from treeline_operator.world import Images

COMPONENT: Final = "runtime"
USER: Final = 65532
_GRACE_MARGIN_S: Final = 10
_LONGEST_NOTICE_S: Final = 5
"""The picker hears of a deletion by its watch, at once; what follows EndpointSlices (a Service, a Gateway) takes a
second or two. A pod without requests ends right after it."""
_DEPLOY_MARGIN_S: Final = 3600


def selector(pool: str) -> dict[str, str]:
    """The labels that all runtime pods of a pool have, of whatever revision."""
    return {labels.POOL: pool, names.COMPONENT: COMPONENT}


def notice_seconds(pool: InferencePool) -> int:
    """How long a pod that is to go still serves as if nothing were, while the picker and the proxies learn of it."""
    return min(_LONGEST_NOTICE_S, max(1, pool.spec.drain.timeout_seconds // 4))


def needs_keys(pool: InferencePool) -> bool:
    """Whether the pods mount the key pair of the KV sockets, which the gateway's plan makes."""
    return launch(pool, files(pool), Images()).keys


def deployment(
    pool: InferencePool, target: Target, replicas: int, meta: dict[str, Any], images: Images
) -> dict[str, Any]:
    """The Deployment of a revision. Its template is made once and not edited any more."""
    match = {**selector(pool.name), names.REVISION: target.name}
    annotations = {names.INPUTS: target.inputs, names.TEMPLATE_VERSION: str(target.template_version)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            **meta,
            "labels": {**meta["labels"], names.REVISION: target.name},
            "annotations": annotations,
        },
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": start_seconds(pool) + _DEPLOY_MARGIN_S,
            "selector": {"matchLabels": match},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": pod_template(pool, target.name, images),
        },
    }


def pod_template(pool: InferencePool, revision: str, images: Images) -> dict[str, Any]:
    """The pods of a revision, with the user's fragment laid over them. Raises TemplateInvalid."""
    found = files(pool)
    start = launch(pool, found, images)
    ours = {
        "metadata": {"labels": _labels(pool, revision)},
        "spec": _pod_spec(pool, revision, found, start, images),
    }
    fragment = pool.spec.template or {}
    unknown = sorted(fragment.keys() - ours.keys())
    if unknown:
        raise TemplateInvalid(
            f"template: {unknown[0]} is not part of a pod template; it has metadata and spec"
        )
    made = merged(ours, fragment)
    if made.keys() != ours.keys() or "containers" not in made["spec"]:
        raise TemplateInvalid("template: metadata, spec and its containers cannot be taken away")
    return _kept(ours, made)


def template_problem(pool: InferencePool) -> str:
    """What is wrong with the user's fragment, as far as can be told without the API server; empty if nothing is."""
    if not pool.spec.template:
        return ""
    try:
        pod_template(pool, "", Images())
    except TemplateInvalid as problem:
        return str(problem)
    return ""


def images_of(there: Existing, otherwise: Images) -> Images:
    """The images that a revision was made with, where the pool names none: an upgrade of the operator changes only its
    defaults, and a revision keeps those that it was made with."""
    pod = there.object["spec"]["template"]["spec"]
    fetch = _container(pod.get("initContainers", ()), DOWNLOAD)
    seen = fetch or _container(pod.get("containers", ()), CONTAINER)
    image = seen.get("image", otherwise.runtime)
    policy = seen.get("imagePullPolicy", otherwise.pull_policy)
    secrets = tuple(secret["name"] for secret in pod.get("imagePullSecrets") or ())
    return Images(runtime=image, runtime_cuda=image, pull_policy=policy, pull_secrets=secrets)


def _container(containers: Any, name: str) -> Mapping[str, Any]:
    return next((c for c in containers if c.get("name") == name), {})


def _labels(pool: InferencePool, revision: str) -> dict[str, str]:
    return {
        names.MANAGED_BY: names.MANAGER,
        names.GATEWAY: pool.spec.gateway.name,
        **selector(pool.name),
        names.REVISION: revision,
        labels.ROLE: "both",
        # Not in the Deployment's selector: a pod that loses it leaves the rotation, not the Deployment.
        labels.SERVING: "true",
    }


def _pod_spec(
    pool: InferencePool, revision: str, found: Files, start: Launch, images: Images
) -> dict[str, Any]:
    accelerator = pool.spec.accelerator
    pull = pool.spec.engine.image_pull_policy or images.pull_policy
    fetch_image = start.image if pool.spec.engine.type == "treeline" else images.runtime
    fetch = init_container(pool, found, fetch_image, pull)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(start),
        "terminationGracePeriodSeconds": _grace_seconds(pool),
        "topologySpreadConstraints": _spread(pool, revision),
    }
    if images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    if accelerator.runtime_class_name:
        spec["runtimeClassName"] = accelerator.runtime_class_name
    if accelerator.is_gpu:
        spec["tolerations"] = _tolerations(pool)
        if accelerator.class_:
            spec["nodeSelector"] = {"nvidia.com/gpu.product": accelerator.class_}
    if fetch is not None:
        spec["initContainers"] = [{**fetch, "securityContext": _container_security()}]
    spec["containers"] = [_runtime(pool, found, start, pull)]
    spec["volumes"] = _volumes(pool, found, start)
    return spec


def _runtime(pool: InferencePool, found: Files, start: Launch, pull: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]
    if start.shared_memory:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if start.keys:
        mounts.append({"name": "kv-keys", "mountPath": KEYS_DIR, "readOnly": True})
    env = [("HOME", "/tmp"), ("USER", "treeline"), ("HF_HOME", "/tmp/hf"), *start.env]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": start.image,
        "imagePullPolicy": pull,
        "args": list(start.args),
        "env": [{"name": name, "value": value} for name, value in env],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in start.ports],
        "resources": _resources(pool),
        **start.probes,
        "lifecycle": {"preStop": {"sleep": {"seconds": _pre_stop_seconds(pool, start)}}},
        # The last words of a crash, for the pool's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _container_security(),
        "volumeMounts": [*mounts, *found.mounts],
    }
    if start.command:
        container["command"] = list(start.command)
    if not start.args:
        del container["args"]
    return container


def _pre_stop_seconds(pool: InferencePool, start: Launch) -> int:
    # An engine that drops its requests when it is asked to stop gets the whole drain before it is asked.
    return notice_seconds(pool) + (0 if start.drains else pool.spec.drain.timeout_seconds)


def _grace_seconds(pool: InferencePool) -> int:
    return notice_seconds(pool) + pool.spec.drain.timeout_seconds + _GRACE_MARGIN_S


def _resources(pool: InferencePool) -> dict[str, Any]:
    accelerator, own = pool.spec.accelerator, pool.spec.engine.resources
    requests = {"cpu": "100m", "memory": "512Mi"}
    limits: dict[str, str] = {}
    if accelerator.is_gpu:
        limits[accelerator.resource_name] = requests[accelerator.resource_name] = str(accelerator.count)
    if own is not None:
        # A limit without a request asks for as much as the limit.
        requests = {k: v for k, v in requests.items() if k not in own.limits} | own.requests
        limits |= own.limits
    resources: dict[str, Any] = {"requests": requests}
    if limits:
        resources["limits"] = limits
    return resources


def _tolerations(pool: InferencePool) -> list[dict[str, Any]]:
    accelerator = pool.spec.accelerator
    if accelerator.tolerations:
        return [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in accelerator.tolerations]
    return [{"key": accelerator.resource_name, "operator": "Exists", "effect": "NoSchedule"}]


def _spread(pool: InferencePool, revision: str) -> list[dict[str, Any]]:
    match = {"matchLabels": {**selector(pool.name), names.REVISION: revision}}
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": match,
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


def _volumes(pool: InferencePool, found: Files, start: Launch) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    if start.shared_memory:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if start.keys:
        # Readable by the group (fsGroup) and nobody else: the runtime refuses keys that are open to everyone.
        secret = {"secretName": names.kv_keys(pool.spec.gateway.name), "defaultMode": 0o440}
        volumes.append({"name": "kv-keys", "secret": secret})
    return [*volumes, *found.volumes]


def _pod_security(start: Launch) -> dict[str, Any]:
    user = {"runAsUser": USER, "runAsGroup": USER} if start.fixed_user else {}
    return {
        "runAsNonRoot": True,
        **user,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _kept(ours: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """What a fragment cannot change: our labels, the ports by which pods are reached, and time enough to drain."""
    metadata = {
        **made["metadata"],
        "labels": {**made["metadata"].get("labels", {}), **ours["metadata"]["labels"]},
    }
    spec = {**made["spec"]}
    grace = ours["spec"]["terminationGracePeriodSeconds"]
    asked = spec.get("terminationGracePeriodSeconds")
    spec["terminationGracePeriodSeconds"] = max(grace, asked) if isinstance(asked, int) else grace
    main = _container(ours["spec"]["containers"], CONTAINER)
    spec["containers"] = [
        {**c, "ports": _ports(main["ports"], c.get("ports", ()))} if c["name"] == CONTAINER else c
        for c in spec["containers"]
    ]
    return {**made, "metadata": metadata, "spec": spec}


def _ports(ours: list[dict[str, Any]], theirs: Any) -> list[dict[str, Any]]:
    names_, numbers = {port["name"] for port in ours}, {port["containerPort"] for port in ours}
    added = [port for port in theirs if port.get("name") not in names_]
    if not all(isinstance(port.get("containerPort"), int) for port in added):
        raise TemplateInvalid("template: every item of ports needs a containerPort")
    return [*ours, *(port for port in added if port["containerPort"] not in numbers)]
