"""Changes of pools, of four kinds in turn, and the children that each must reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treeline_bench.kubernetes.api import MERGE, Call
from treeline_bench.kubernetes.children import POOL_LABEL, Object, Want
from treeline_bench.kubernetes.objects import Fleet, Pool, numbers

KINDS = ("replicas", "engine", "port", "picker")
FIRST_PORT = 10_000
FIRST_TTFT_S = 31


@dataclass(frozen=True)
class Change:
    """A change of one pool, which nothing else has changed before."""

    pool: Pool
    spec: dict[str, Any]
    wants: tuple[Want, ...]

    def call(self) -> Call:
        return Call("PATCH", self.pool.path, {"spec": self.spec}, MERGE)


def change(fleet: Fleet, number: int) -> Change:
    """The ``number``-th change, each of another pool; neighbours are of different kinds, far from each other.

    Of a gateway's pools each kind has its own: the oldest sets the picker's settings.
    """
    turn, kind = divmod(number, len(KINDS))
    pool = fleet.pool(turn + kind * fleet.places // len(KINDS), (kind + 1) % len(KINDS))
    return _MAKERS[KINDS[kind]](pool, number)


def _replicas(pool: Pool, number: int) -> Change:
    def scaled(_: str, obj: Object) -> bool:
        return _of_pool(obj, pool) and bool(obj["spec"]["replicas"] == 2)

    return Change(pool, {"replicas": 2}, (Want("Deployment", f"{pool.name} with 2 replicas", scaled),))


def _engine(pool: Pool, number: int) -> Change:
    return Change(pool, {"engine": {"maxRunningRequests": 48}}, (_new_revision(pool),))


def _port(pool: Pool, number: int) -> Change:
    port = FIRST_PORT + number

    def has(name: str) -> Callable[[str, Object], bool]:
        return lambda _, obj: obj["metadata"]["name"] == name and port in numbers(obj["spec"])

    names = (f"{pool.name}-pods", f"{pool.gateway}-epp", f"{pool.gateway}-edge")
    policies = (Want("NetworkPolicy", f"NetworkPolicy {name} with port {port}", has(name)) for name in names)
    service = Want("Service", f"Service {pool.name}-pods with port {port}", has(f"{pool.name}-pods"))
    return Change(pool, {"engine": {"port": port}}, (_new_revision(pool), service, *policies))


def _picker(pool: Pool, number: int) -> Change:
    seconds = FIRST_TTFT_S + number
    name = f"{pool.gateway}-epp"

    def has_flag(_: str, obj: Object) -> bool:
        if obj["metadata"]["name"] != name:
            return False
        containers = obj["spec"]["template"]["spec"]["containers"]
        return any(f"--max-ttft-seconds={seconds}" in (each.get("args") or ()) for each in containers)

    spec = {"endpointPicker": {"parameters": {"maxTtftSeconds": seconds}}}
    return Change(pool, spec, (Want("Deployment", f"{name} with {seconds} s", has_flag),))


def _new_revision(pool: Pool) -> Want:
    def new(event: str, obj: Object) -> bool:
        return event == "ADDED" and _of_pool(obj, pool)

    return Want("Deployment", f"a new revision of {pool.name}", new)


def _of_pool(obj: Object, pool: Pool) -> bool:
    return bool(obj["metadata"]["labels"].get(POOL_LABEL) == pool.name)


_MAKERS: dict[str, Callable[[Pool, int], Change]] = {
    "replicas": _replicas,
    "engine": _engine,
    "port": _port,
    "picker": _picker,
}
