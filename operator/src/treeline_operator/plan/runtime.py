"""The pods of a pool: the Deployment or LeaderWorkerSet of one revision, from the spec and the user's fragment of a
template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.api.engine import Accelerator
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import facts, live_adapters, objects
from treeline_operator.plan.download import Files, files, init_container
from treeline_operator.plan.engines import KEYS_DIR, TEMPLATE_DIR, Launch, admin_port, engine_of, start_seconds
from treeline_operator.plan.facts import CONTAINER, DOWNLOAD
from treeline_operator.plan.facts import pod_template as pod_template_of
from treeline_operator.plan.merge import TemplateInvalid, laid_over, merged, overruled
from treeline_operator.plan.objects import (
    Object,
    container_port,
    container_security,
    mount,
    pod_security,
    secret_volume,
    template_volume,
)
from treeline_operator.plan.provision import cache_env, mounts, requests, volumes
from treeline_operator.plan.revision import ExistingRevision, TargetRevision
from treeline_operator.world import Images

COMPONENT: Final = "runtime"
_GRACE_MARGIN_S: Final = 10
_LONGEST_NOTICE_S: Final = 5
"""The picker hears of a deletion by its watch, at once; what follows EndpointSlices (a Service, a Gateway) takes a
second or two. A pod without requests ends right after it."""
_DEPLOY_MARGIN_S: Final = 3600
_ZONE: Final = "topology.kubernetes.io/zone"


def selector(pool: str) -> dict[str, str]:
    """The labels of all runtime pods of a pool, of any revision."""
    return {labels.POOL: pool, names.COMPONENT: COMPONENT}


def notice_seconds(pool: InferencePool) -> int:
    """Seconds for which a leaving pod serves as before, while picker and proxies learn of it."""
    return min(_LONGEST_NOTICE_S, max(1, pool.spec.drain.timeout_seconds // 4))


def needs_keys(pool: InferencePool) -> bool:
    """Whether the pods mount the key pair of the KV sockets, which the gateway's plan makes."""
    return engine_of(pool).launch(pool, files(pool), Images()).keys


def needs_admin_key(pool: InferencePool) -> bool:
    """Whether the pods get a key to the engine's administration, which the pool's plan makes."""
    return bool(engine_of(pool).launch(pool, files(pool), Images()).admin_key)


def workload(pool: InferencePool, target: TargetRevision, replicas: int, meta: Object, images: Images) -> Object:
    """The Deployment of a revision, or the LeaderWorkerSet if a replica is several pods. Its template is made once and
    never edited."""
    meta = {**meta, "labels": {**meta["labels"], names.REVISION: target.name}}
    template, nodes = pod_template(pool, target.name, images), pool.spec.accelerator.nodes
    if nodes > 1:
        return objects.leader_worker_set(meta, template, _worker_template(template), nodes, replicas)
    return objects.deployment(
        meta,
        {**selector(pool.name), names.REVISION: target.name},
        template,
        replicas,
        revisionHistoryLimit=1,
        progressDeadlineSeconds=start_seconds(pool) + _DEPLOY_MARGIN_S,
    )


def is_late(pool: InferencePool, revision: Object, now: datetime) -> bool:
    """Whether a revision's newest pods should have become ready by now. A Deployment's controller says it itself;
    groups have as long since not all of them are ready."""
    if revision["kind"] == "Deployment":
        return facts.is_overdue(revision)
    begun = facts.since(revision, "Progressing") or facts.created(revision)
    allowed = timedelta(seconds=start_seconds(pool) + _DEPLOY_MARGIN_S)
    return facts.condition_of(revision, "Progressing").get("status") != "False" and now - begun >= allowed


def pod_template(pool: InferencePool, revision: str, images: Images) -> Object:
    """The pods of a revision, with the user's fragments laid over them. Raises TemplateInvalid."""
    made = _side(pool, revision)
    return laid_over(_own_template(made, revision, images), _fragments(made), CONTAINER)


def _worker_template(leader: Object) -> Object:
    """The other pods of a group: like the leader, but they serve nothing, and are placed in its zone if there is
    room."""
    labels_ = {k: v for k, v in leader["metadata"]["labels"].items() if k != labels.SERVING}
    kept = {k: v for k, v in leader["spec"].items() if k != "topologySpreadConstraints"}
    serving = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    containers = [
        {k: v for k, v in container.items() if container["name"] != CONTAINER or k not in serving}
        for container in kept["containers"]
    ]
    near = {
        "labelSelector": {"matchLabels": {labels.POOL: labels_[labels.POOL]}},
        "matchLabelKeys": ["leaderworkerset.sigs.k8s.io/group-key"],
        "topologyKey": _ZONE,
    }
    affinity = {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": near}]}
    }
    spec = {"affinity": affinity, **kept, "containers": containers}
    return {"metadata": {**leader["metadata"], "labels": labels_}, "spec": spec}


def template_overruled(pool: InferencePool) -> tuple[str, ...]:
    """The paths of the user's fragment that have no effect."""
    if not pool.spec.template or template_problem(pool):
        return ()
    return overruled(_own_template(pool, "", Images()), _fragments(pool), CONTAINER)


def role(pool: InferencePool, revision: str) -> str:
    """The part of a request that pods of a revision compute: `prefill`, `decode` or `both`."""
    if pool.spec.prefill is None:
        return "both"
    return "prefill" if names.is_prefill(revision) else "decode"


def accelerator_of(pool: InferencePool, revision: str) -> Accelerator:
    """The devices of a pod of a revision."""
    own = pool.spec.prefill if role(pool, revision) == "prefill" else None
    return (own and own.accelerator) or pool.spec.accelerator


def _side(pool: InferencePool, revision: str) -> InferencePool:
    """The pool as the pods of a revision are made from it. Raises TemplateInvalid."""
    own = pool.spec.prefill
    if own is None or role(pool, revision) != "prefill":
        return pool
    changed: dict[str, Any] = {"accelerator": accelerator_of(pool, revision)}
    if own.template:
        changed["template"] = merged(pool.spec.template or {}, own.template, keep_unset=True)
    return pool.model_copy(update={"spec": pool.spec.model_copy(update=changed)})


def _fragments(pool: InferencePool) -> tuple[Object, ...]:
    return (pool.spec.template,) if pool.spec.template else ()


def _own_template(pool: InferencePool, revision: str, images: Images) -> Object:
    found = files(pool)
    engine, part = engine_of(pool), role(pool, revision)
    start = engine.launch(pool, found, images)
    if part != "both":
        assert engine.apart is not None, "refused by a rule"
        start = engine.apart(start, part)
    meta: Object = {"labels": _labels(pool, revision)}
    if start.annotations:
        meta["annotations"] = dict(start.annotations)
    return {"metadata": meta, "spec": _pod_spec(pool, revision, found, start, images)}


def template_problem(pool: InferencePool) -> str:
    """Errors in the user's fragments, as far as they show without the API server; empty if none."""
    own = pool.spec.prefill
    try:
        if pool.spec.template:
            pod_template(pool, "", Images())
        if own is not None and (pool.spec.template or own.template):
            pod_template(pool, names.PREFILL, Images())
    except TemplateInvalid as problem:
        return str(problem)
    return ""


def images_of(there: ExistingRevision, otherwise: Images) -> Images:
    """The images that a revision was made with, for pools that name none: an upgrade of the operator changes only the
    defaults of new revisions."""
    pod = pod_template_of(there.object)["spec"]
    fetch = _container(pod.get("initContainers", ()), DOWNLOAD)
    seen = fetch or _container(pod.get("containers", ()), CONTAINER)
    image = seen.get("image", otherwise.runtime)
    policy = seen.get("imagePullPolicy", otherwise.pull_policy)
    secrets = tuple(secret["name"] for secret in pod.get("imagePullSecrets") or ())
    return Images(runtime=image, runtime_cuda=image, epp=image, pull_policy=policy, pull_secrets=secrets)


def names_model(there: Mapping[str, Any], name: str) -> bool:
    """Whether the pods of a revision were started with this model name."""
    main = _container(pod_template_of(there)["spec"].get("containers", ()), CONTAINER)
    reported = [arg.rpartition("=")[2] for arg in main.get("args", ()) if arg.startswith("--served-model-name=")]
    args = list(main.get("args", ()))
    reported += [after for flag, after in pairwise(args) if flag == "--served-model-name"]
    reported += [env.get("value") for env in main.get("env", ()) if env["name"] == "TREELINE_MODEL_NAME"]
    return name in reported


def _container(containers: Any, name: str) -> Mapping[str, Any]:
    return next((c for c in containers if c.get("name") == name), {})


def _labels(pool: InferencePool, revision: str) -> dict[str, str]:
    return {
        names.MANAGED_BY: names.MANAGER,
        names.GATEWAY: pool.spec.gateway.name,
        **selector(pool.name),
        names.REVISION: revision,
        labels.ROLE: role(pool, revision),
        # Not in the Deployment's selector: a pod that loses it leaves rotation, not the Deployment.
        labels.SERVING: "true",
    }


def _pod_spec(pool: InferencePool, revision: str, found: Files, start: Launch, images: Images) -> Object:
    accelerator, security = pool.spec.accelerator, _container_security(pool)
    fetch_image = start.image if start.downloads else images.epp
    fetch = init_container(pool, found, fetch_image, images.pull_policy)
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(fixed_user=start.fixed_user, fsGroupChangePolicy="OnRootMismatch"),
        "terminationGracePeriodSeconds": notice_seconds(pool) + pool.spec.drain.timeout_seconds + _GRACE_MARGIN_S,
        "topologySpreadConstraints": _spread(pool, revision),
    }
    if images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    if accelerator.is_gpu:
        spec["tolerations"] = [{"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"}]
        if accelerator.class_:
            spec["nodeSelector"] = {accelerator.product_label: accelerator.class_}
    beside = live_adapters.container(pool, start.image, images.pull_policy, admin_port(pool), security)
    first = [{**fetch, "securityContext": security}] if fetch is not None else []
    if inits := first + ([beside] if beside is not None else []):
        spec["initContainers"] = inits
    spec["containers"] = [_runtime(pool, found, start, images.pull_policy)]
    spec["volumes"] = _volumes(pool, found, start)
    return spec


def _runtime(pool: InferencePool, found: Files, start: Launch, pull: str) -> Object:
    mounted = list(mounts(shared_memory=start.shared_memory))
    if start.keys:
        mounted.append(mount("kv-keys", KEYS_DIR))
    if pool.spec.model.chat_template_ref is not None:
        mounted.append(mount("chat-template", TEMPLATE_DIR))
    env = [("HOME", "/tmp"), ("USER", "treeline"), *cache_env(start.caches), *start.env]
    container: Object = {
        "name": CONTAINER,
        "image": start.image,
        "imagePullPolicy": pull,
        "args": list(start.args),
        "env": [*({"name": name, "value": value} for name, value in env), *_references(pool, start)],
        "ports": [container_port(name, number) for name, number in start.ports],
        "resources": _resources(pool),
        **start.probes,
        "lifecycle": {"preStop": {"sleep": {"seconds": _pre_stop_seconds(pool, start)}}},
        # The last line of a crash, for the pool's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _container_security(pool),
        "volumeMounts": [*mounted, *found.mounts, *live_adapters.mounts(pool)],
    }
    if start.command:
        container["command"] = list(start.command)
    if not start.args:
        del container["args"]
    return container


def _references(pool: InferencePool, start: Launch) -> Iterator[Object]:
    """Environment that the kubelet takes from Secrets and from the pod."""
    if start.pod_ip:
        yield {"name": start.pod_ip, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    if start.admin_key:
        reference = {"name": names.admin_key(pool.name), "key": names.ADMIN_KEY_FILE}
        yield {"name": start.admin_key, "valueFrom": {"secretKeyRef": reference}}


def _pre_stop_seconds(pool: InferencePool, start: Launch) -> int:
    # An engine that drops its requests when stopped gets the whole drain time before.
    return notice_seconds(pool) + (0 if start.drains else pool.spec.drain.timeout_seconds)


def _resources(pool: InferencePool) -> Object:
    accelerator, own = pool.spec.accelerator, pool.spec.engine.resources
    asked = requests(pool)
    limits: dict[str, str] = {}
    if accelerator.is_gpu and not _claims_devices(pool):
        limits[accelerator.resource] = asked[accelerator.resource] = str(accelerator.count)
    if own is not None:
        # A limit without a request also sets the request.
        asked = {k: v for k, v in asked.items() if k not in own.limits} | own.requests
        limits |= own.limits
    resources: Object = {"requests": asked}
    if limits:
        resources["limits"] = limits
    return resources


def _claims_devices(pool: InferencePool) -> bool:
    """Whether the user's fragment gives the engine's container devices through dynamic resource allocation: requesting
    them also as a resource would double them. Raises TemplateInvalid."""
    asked = merged({"spec": {"containers": [{"name": CONTAINER, "resources": {}}]}}, pool.spec.template or {})
    main = _container(asked.get("spec", {}).get("containers", ()), CONTAINER)
    return bool(main.get("resources", {}).get("claims"))


def _spread(pool: InferencePool, revision: str) -> list[Object]:
    match = {"matchLabels": {**selector(pool.name), names.REVISION: revision}}
    return [
        {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": match}
        for key in (_ZONE, "kubernetes.io/hostname")
    ]


def _volumes(pool: InferencePool, found: Files, start: Launch) -> list[Object]:
    made = list(volumes(pool, shared_memory=start.shared_memory))
    if start.keys:
        made.append(secret_volume("kv-keys", names.kv_keys(pool.spec.gateway.name)))
    if (template := pool.spec.model.chat_template_ref) is not None:
        made.append(template_volume("chat-template", template.name, template.key, optional=False))
    return [*made, *found.volumes, *live_adapters.volumes(pool)]


def _container_security(pool: InferencePool) -> Object:
    # nvidia-cdi-hook makes links and runs ldconfig in the container's root before it starts; where that is read-only
    # the container is not made at all. The hook may be called for every container of a GPU image.
    return container_security(read_only=not pool.spec.accelerator.is_gpu)
