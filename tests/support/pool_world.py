"""A small cluster for plans of pools: an API server with defaults, deployments that make pods, living pods."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

from treeline_operator import names
from treeline_operator.actions import Apply, Delete, Mark, Plan, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.plan.pool import plan_pool
from treeline_operator.plan.runtime import pod_template
from treeline_operator.simulation import marked
from treeline_operator.world import (
    GatewayWorld,
    Images,
    Observed,
    PickerEndpoint,
    PickerView,
    Platform,
    PoolWorld,
    Ref,
)
from treeline_wire.labels import GROUP_INDEX, SERVING, WORKER_INDEX

NOW = datetime(2026, 11, 1, tzinfo=UTC)
EVERY_API = frozenset(
    {
        "gateway.networking.k8s.io/v1/HTTPRoute",
        "inference.networking.k8s.io/v1/InferencePool",
        "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
        "monitoring.coreos.com/v1/PodMonitor",
    }
)
HF: dict[str, Any] = {"model": {"uri": "hf://org/name"}}


def a_pool(
    name: str = "tiny", *, uid: str = "pool-uid", metadata: dict[str, Any] | None = None, **spec: Any
) -> InferencePool:
    """Return an InferencePool with this spec, in the words of its YAML."""
    own = spec.get("engine", {}).get("type", "treeline") == "treeline"
    spec.setdefault("model", {"uri": "builtin://tiny" if own else "path:///weights/tiny"})
    meta = {
        "name": name,
        "namespace": "serving",
        "uid": uid,
        "generation": 1,
        "creationTimestamp": NOW.isoformat(),
    }
    pool = InferencePool.from_object(
        {
            "apiVersion": "treeline.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {**meta, **(metadata or {})},
            "spec": spec,
        },
        strict=True,
    )
    assert not list(violations(pool)), "the API server would refuse it"
    return pool


def grouped(replicas: int = 1, **spec: Any) -> InferencePool:
    """Return a pool whose replicas are two pods each, on CPUs."""
    return a_pool(replicas=replicas, **{"accelerator": {"nodes": 2}, "engine": {"tensorParallel": 2}, **spec})


class SimCluster:
    """The cluster's objects. ``capacity`` is the number of pods that find a node."""

    def __init__(self, platform: Platform | None = None, capacity: int = 1000) -> None:
        self.platform = platform or Platform()
        self.capacity = capacity
        self.lacking = "Insufficient cpu"
        self.objects: dict[Ref, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.picker: PickerView | None = None
        self.others: tuple[InferencePool, ...] = ()
        self.has_keys = True
        self.now = NOW
        self.silent_since: datetime | None = NOW
        self.streams: dict[str, int] = {}
        self._serial = 0

    # ---- the planner's side ---------------------------------------------------------------------------------

    def world(self, pool: InferencePool) -> PoolWorld:
        children = tuple(Observed.of(obj) for obj in self.objects.values())
        pods = tuple(Observed.of(pod) for pod in self.pods.values())
        shared = (_anchor(pool), *((_picker(pool),) if self.has_keys else ()))
        gateway = GatewayWorld(
            pool.namespace, pool.spec.gateway.name, (*self.others, pool), shared, (), self.platform, self.now
        )
        silent = self.silent_since if self.picker is None else None
        return PoolWorld(
            pool,
            children,
            pods,
            gateway,
            self.picker,
            self.platform,
            self.now,
            picker_silent_since=silent,
        )

    def look(self, pool: str = "tiny") -> None:
        """Take the picker's view of the pods, with the requests in flight of :attr:`streams`."""
        listed = tuple(
            PickerEndpoint(
                name,
                f"{name}:8000",
                is_ready(pod) and not _draining(pod),
                _draining(pod),
                self.streams.get(name, 0),
            )
            for name, pod in sorted(self.pods.items())
        )
        self.picker = PickerView(True, {pool: listed}, at=self.now)

    def rename_pods(self, pattern: str) -> None:
        """Give the pods short names, by age."""
        old = sorted(self.pods, key=lambda name: int(name.rsplit("-", 1)[1]))
        renamed = {pattern.format(number): self.pods[name] for number, name in enumerate(old, start=1)}
        for number, (name, pod) in enumerate(renamed.items()):
            created = self.now - timedelta(seconds=len(old) - number)
            pod["metadata"].update(name=name, creationTimestamp=created.isoformat())
        self.pods = renamed

    def be_silent(self) -> None:
        """Let all pickers be silent from now on."""
        if self.picker is not None:
            self.picker, self.silent_since = None, self.now

    def plan(self, pool: InferencePool) -> Plan:
        return plan_pool(self.world(pool))

    def do(self, plan: Plan) -> None:
        for action in plan.actions:
            match action:
                case Apply():
                    self._apply(action)
                case Scale(ref, uid, replicas):
                    assert self.objects[ref]["metadata"]["uid"] == uid
                    self.objects[ref]["spec"]["replicas"] = replicas
                    self._touched(self.objects[ref])
                case Mark(ref, uid):
                    if ref.name in self.pods:
                        assert self.pods[ref.name]["metadata"]["uid"] == uid
                        self.pods[ref.name] = marked(self.pods[ref.name], action)
                case Delete(ref, uid):
                    assert self.objects[ref]["metadata"]["uid"] == uid
                    del self.objects[ref]

    def converge(self, pool: InferencePool, rounds: int = 100) -> int:
        """Plan, apply and make the pods ready until nothing remains; return the number of rounds. Time passes if the
        plan only waits for it."""
        for done in range(rounds):
            plan = self.plan(pool)
            before = copy.deepcopy(self.pods)
            self.do(plan)
            self.controllers()
            self.make_ready()
            if not plan.actions and before == self.pods:
                draining = any(_draining(pod) for pod in self.pods.values())
                told = self.picker is not None and self.picker.at is not None
                if plan.recheck_s is None or not (draining or told):
                    assert not draining, "no recheck is planned"
                    return done
                self.now += timedelta(seconds=plan.recheck_s)
                if told:
                    self.look(pool.name)
        raise AssertionError(f"no end after {rounds} rounds: {self.plan(pool).actions}")

    def deployments(self) -> dict[str, dict[str, Any]]:
        return {ref.name: obj for ref, obj in self.objects.items() if ref.kind == "Deployment"}

    def groups(self) -> dict[str, dict[str, Any]]:
        return {ref.name: obj for ref, obj in self.objects.items() if ref.kind == "LeaderWorkerSet"}

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return next(obj for ref, obj in self.objects.items() if (ref.kind, ref.name) == (kind, name))

    # ---- the cluster's side ---------------------------------------------------------------------------------

    def controllers(self) -> None:
        """Take the next step of the deployment controller, of LeaderWorkerSet's, and of the scheduler."""
        for name, obj in self.deployments().items():
            labels = obj["spec"]["template"]["metadata"]["labels"]
            mine = [p for p in self.pods.values() if p["metadata"]["labels"][names.REVISION] == labels[names.REVISION]]
            wanted = obj["spec"]["replicas"]
            # Pods that are not ready go first, then those whose cost is lowest.
            mine.sort(key=lambda pod: (not is_ready(pod), -_cost(pod), pod["metadata"]["name"]))
            for extra in mine[wanted:]:
                del self.pods[extra["metadata"]["name"]]
            for _ in range(wanted - len(mine)):
                self._serial += 1
                self._start(f"{name}-{self._serial}", obj["spec"]["template"])
            obj["status"] = {"observedGeneration": obj["metadata"]["generation"], "replicas": wanted}
        for name, obj in self.groups().items():
            self._start_groups(name, obj)
        self.schedule()

    def _start_groups(self, name: str, obj: dict[str, Any]) -> None:
        """Make the groups up to the number wanted, and end the others, whatever their pods do."""
        parts, wanted = obj["spec"]["leaderWorkerTemplate"], obj["spec"]["replicas"]
        for pod in [p for p in self.pods.values() if p["metadata"]["name"].startswith(f"{name}-")]:
            if int(pod["metadata"]["labels"][GROUP_INDEX]) >= wanted:
                del self.pods[pod["metadata"]["name"]]
        for group in range(wanted):
            for worker in range(parts["size"]):
                pod_name = f"{name}-{group}" + (f"-{worker}" if worker else "")
                if pod_name not in self.pods:
                    marks = {GROUP_INDEX: str(group), WORKER_INDEX: str(worker)}
                    self._start(pod_name, parts["workerTemplate" if worker else "leaderTemplate"], marks)
        obj["status"] = {"replicas": wanted, "conditions": []}

    def _start(self, name: str, template: dict[str, Any], marks: dict[str, str] | None = None) -> None:
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "serving",
                "uid": name,
                "labels": {**template["metadata"]["labels"], **(marks or {})},
                "creationTimestamp": self.now.isoformat(),
            },
            "spec": dict(template["spec"]),
            "status": {"phase": "Pending", "conditions": []},
        }

    def schedule(self) -> None:
        """Give pods a node while there is room; mark the others unschedulable."""
        placed = sum(1 for pod in self.pods.values() if _placed(pod))
        for pod in self.pods.values():
            if not _placed(pod):
                if placed < self.capacity:
                    placed += 1
                    pod["spec"]["nodeName"] = "node"
                    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                elif not pod["status"]["conditions"]:
                    pod["status"]["conditions"] = [
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": f"0/1 nodes are available: 1 {self.lacking}. preemption: not helpful.",
                            "lastTransitionTime": self.now.isoformat(),
                        }
                    ]

    def make_ready(self, pod_name: str | None = None) -> None:
        """Let a pod, or all, finish its download and pass its probes."""
        for name, pod in self.pods.items():
            if pod_name in (None, name) and _placed(pod) and not is_ready(pod):
                status = pod["status"]
                status.update(phase="Running", containerStatuses=[{"name": "runtime", "ready": True}])
                status["initContainerStatuses"] = [
                    {"name": c["name"], "ready": True, "state": {"terminated": {"exitCode": 0}}}
                    for c in pod["spec"].get("initContainers", ())
                ]
                status["conditions"].append({"type": "Ready", "status": "True"})

    def crash(self, pod_name: str) -> None:
        pod = self.pods[pod_name]
        waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3, "ready": False}
        pod["status"]["containerStatuses"] = [{"name": "runtime", **waiting}]
        pod["status"]["conditions"] = [c for c in pod["status"]["conditions"] if c["type"] != "Ready"]

    def ready(self) -> int:
        return sum(1 for pod in self.pods.values() if is_ready(pod))

    def _apply(self, action: Apply) -> None:
        old = self.objects.get(action.ref)
        made = copy.deepcopy(action.object)
        if old is not None:
            made["metadata"] = {**old["metadata"], **made["metadata"]}
            if action.ref.kind == "Deployment":
                assert old["spec"]["selector"] == made["spec"]["selector"]
        self._serial += 1
        meta = made["metadata"]
        meta.setdefault("uid", f"uid-{self._serial}")
        meta.setdefault("creationTimestamp", f"2026-11-01T00:{self._serial // 60 % 60:02}:{self._serial % 60:02}Z")
        self.objects[action.ref] = defaulted(made)
        self._touched(self.objects[action.ref])

    def _touched(self, obj: dict[str, Any]) -> None:
        self._serial += 1
        meta = obj["metadata"]
        meta["resourceVersion"] = str(self._serial)
        meta["generation"] = meta.get("generation", 0) + 1
        meta["managedFields"] = [{"manager": "somebody"}]


def _anchor(pool: InferencePool) -> Observed:
    """Return the ConfigMap that owns the gateway's objects."""
    meta = {"name": names.anchor(pool.spec.gateway.name), "namespace": pool.namespace, "uid": "uid-anchor"}
    return Observed.of({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})


def _picker(pool: InferencePool) -> Observed:
    """Return the Deployment of the gateway's picker, which is made once the keys exist."""
    meta = {"name": names.epp(pool.spec.gateway.name), "namespace": pool.namespace, "uid": "uid-epp"}
    return Observed.of({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": {}})


def defaulted(obj: dict[str, Any]) -> dict[str, Any]:
    """Return an object as the API server stores it: with defaults, respelled quantities and no empty fields."""
    obj = _respelled(obj)
    spec = obj.get("spec", {})
    if obj["kind"] == "Deployment":
        pod = spec["template"]["spec"]
        pod.update(dnsPolicy="ClusterFirst", restartPolicy="Always", schedulerName="default-scheduler")
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            container.setdefault("terminationMessagePolicy", "File")
            container.setdefault("imagePullPolicy", "IfNotPresent")
            container.setdefault("resources", {})
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    container[probe].setdefault("successThreshold", 1)
                    container[probe].get("httpGet", {}).setdefault("scheme", "HTTP")
        obj["metadata"].setdefault("annotations", {})["deployment.kubernetes.io/revision"] = "1"
        pod["containers"].append({"name": "injected", "image": "sidecar"})
    elif obj["kind"] == "Service":
        spec.update(clusterIPs=["None"], internalTrafficPolicy="Cluster", type="ClusterIP", sessionAffinity="None")
    elif obj["kind"] == "PersistentVolumeClaim":
        spec.setdefault("storageClassName", "standard")
        spec.update(volumeMode="Filesystem", volumeName="pv-1")
    obj["metadata"].setdefault("labels", {})["team"] = "somebody"
    return obj


def _respelled(value: Any, key: str = "", parent: str = "") -> Any:
    if isinstance(value, dict):
        made = {k: _respelled(v, k, key) for k, v in value.items()}
        return {k: v for k, v in made.items() if v is not None and v != [] and v != ""}
    if isinstance(value, list):
        return [_respelled(item, key, parent) for item in value]
    if parent in ("requests", "limits"):
        return {"1024Mi": "1Gi", "0.5": "500m", "1000m": "1"}.get(str(value), str(value))
    return value


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])


def _draining(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"].get(SERVING) == "false")


def _cost(pod: dict[str, Any]) -> int:
    return int(pod["metadata"].get("annotations", {}).get(names.DELETION_COST, "0"))


def _placed(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "PodScheduled" and c["status"] == "True" for c in pod["status"]["conditions"])


def template(**spec: Any) -> dict[str, Any]:
    """Return the pod template of a pool with this spec."""
    return pod_template(a_pool(**spec), "abc", Images())


def runtime(**spec: Any) -> dict[str, Any]:
    """Return the engine's container of a pool with this spec."""
    containers = template(**spec)["spec"]["containers"]
    found: dict[str, Any] = next(c for c in containers if c["name"] == "runtime")
    return found


def kinds(plan: Plan) -> list[str]:
    """List a plan's actions: type, kind and name of each."""
    return [f"{type(action).__name__} {action.ref.kind} {action.ref.name}" for action in plan.actions]


def settled(pool: InferencePool, **options: Any) -> SimCluster:
    """Return a cluster in which the pool has converged."""
    cluster = SimCluster(**options)
    cluster.converge(pool)
    return cluster
