"""Conversion of pods to endpoints. Pure.

A pod is an endpoint when it belongs to a pool, has an address and has not ended; its Ready condition, its deletion and
its labels say how far it may be used, and for which part of a request. A container that restarts is another process, so
its count is in the uid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import msgspec
from treeline_wire import labels

from treeline_epp.endpoints.spec import EndpointSpec, KvPorts, normal_ip
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.kube import objects
from treeline_epp.kube.kv_config import kv_ports
from treeline_epp.kube.pools import Pool

RUNTIME_CONTAINER = "runtime"
ACTIVE_PORTS = ("inference.networking.k8s.io/active-ports", "llm-d.ai/active-ports")
"""Annotations that restrict a pod's ports to those that are in use; the first that is present counts."""
_LLM_D_ROLE = "llm-d.ai/role"
_ROLES = {"": Role.BOTH, "prefill-decode": Role.BOTH, **{role.value: role for role in Role}}
"""Roles by the values of their labels. Pods with others, as llm-d's encoders, are no endpoints."""
_ENDED = frozenset({"Succeeded", "Failed"})


class Pod(msgspec.Struct, frozen=True):
    """A pod, reduced to the facts that decide its endpoints. `active_ports` is `None` if all are active. `kv`: the
    ports of its KV events, if the object names them. `protocol` is its annotation `treeline.dev/kv-transfer`.
    """

    name: str
    uid: str
    labels: Mapping[str, str]
    ip: str | None = None
    ready: bool = False
    ended: bool = False
    terminating: bool = False
    restarts: int = 0
    active_ports: frozenset[int] | None = None
    created: str = ""
    kv: KvPorts | None = None
    protocol: str = ""

    @property
    def role(self) -> Role | None:
        """The part of a request that it computes; None if it is no endpoint."""
        return _ROLES.get(self.labels.get(labels.ROLE) or self.labels.get(_LLM_D_ROLE, ""))

    @property
    def transfer(self) -> Transfer | None:
        """How it hands prompts over, if its object says so: pods with llm-d's label have llm-d's sidecar."""
        sidecar = Protocol.LLM_D if _LLM_D_ROLE in self.labels and labels.ROLE not in self.labels else ""
        said = self.protocol if self.protocol in set(Protocol) else sidecar
        return Transfer(Protocol(said)) if said else None

    @property
    def worker(self) -> bool:
        """Whether it only computes for the leader of its group, which serves the requests of all."""
        return self.labels.get(labels.WORKER_INDEX, "0") != "0"

    @property
    def draining(self) -> bool:
        """Whether it only finishes its requests: it is being deleted, or its label says that it serves no more."""
        return self.terminating or self.labels.get(labels.SERVING) == "false"


def read_pod(data: msgspec.Raw) -> Pod:
    """Parse a pod. Raises `msgspec.MsgspecError`."""
    found = _pod(data)
    meta, status = found.metadata, found.status
    return Pod(
        meta.name,
        meta.uid,
        meta.labels or {},
        ip=normal_ip(status.pod_ip) if status.pod_ip else None,
        ready=any(c.type == "Ready" and c.status == "True" for c in status.conditions or ()),
        ended=status.phase in _ENDED,
        terminating=meta.deletion_timestamp is not None,
        restarts=_restarts(status.container_statuses or ()),
        active_ports=_active_ports(meta.annotations or {}),
        created=meta.creation_timestamp or "",
        kv=kv_ports(meta.annotations or {}, found.spec.containers),
        protocol=(meta.annotations or {}).get(labels.KV_TRANSFER, ""),
    )


def endpoints(pools: Iterable[Pool], pods: Iterable[Pod]) -> tuple[EndpointSpec, ...]:
    """Return every endpoint of every pool, by name. No name and no address occurs twice.

    If two pods have one address, the newer one has it: the older one has ended, and its object is not gone yet.
    """
    known = list(pools)
    by_label = {pool.selector[labels.POOL]: pool for pool in known if _is_own(pool)}
    others = [pool for pool in known if not _is_own(pool)]
    by_address: dict[str, EndpointSpec] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)):
        if pod.ip is None or pod.ended or pod.worker or pod.role is None:
            continue
        pool = by_label.get(pod.labels.get(labels.POOL, ""))
        if pool is None:
            pool = next((other for other in others if other.matches(pod.labels)), None)
        if pool is not None:
            by_address.update((spec.address, spec) for spec in _of_pod(pool, pod))
    return tuple(sorted(by_address.values(), key=lambda spec: spec.name))


def _is_own(pool: Pool) -> bool:
    return pool.selector.keys() == {labels.POOL}


def _of_pod(pool: Pool, pod: Pod) -> Iterable[EndpointSpec]:
    host = f"[{pod.ip}]" if ":" in (pod.ip or "") else pod.ip
    assert pod.role is not None
    for rank, port in enumerate(pool.ports):
        if pod.active_ports is None or port in pod.active_ports:
            yield EndpointSpec(
                f"{pod.name}-rank-{rank}" if pool.ranks else pod.name,
                f"{host}:{port}",
                pool=pool.name,
                uid=f"{pod.uid}:{pod.restarts}",
                ready=pod.ready,
                draining=pod.draining,
                trust_ready=pool.trust_ready,
                engine=pool.engine,
                kv=_of_rank(pod.kv, rank, len(pool.ports)),
                role=pod.role,
                transfer=pod.transfer,
            )


def _of_rank(kv: KvPorts | None, rank: int, endpoints: int) -> KvPorts | None:
    """Return the publishers of the engine at one of a pod's ports. With several ports each is a server for one
    data-parallel rank, as in upstream pools; with one port all ranks are behind it.
    """
    if kv is None or endpoints == 1:
        return kv
    return dataclasses.replace(kv, ranks=1, first_rank=rank)


def _restarts(statuses: Iterable[objects.ContainerStatus]) -> int:
    """Return the restarts of the container with our name, or of all together without one."""
    counts = {status.name: status.restart_count for status in statuses}
    return counts.get(RUNTIME_CONTAINER, sum(counts.values()))


def _active_ports(annotations: Mapping[str, str]) -> frozenset[int] | None:
    for name in ACTIVE_PORTS:
        if name in annotations:
            words = (word.strip() for word in annotations[name].split(","))
            return frozenset(int(word) for word in words if word.isascii() and word.isdecimal())
    return None


_pod = msgspec.json.Decoder(objects.Pod).decode
