"""A fake API server with the engines that its pods stand for, and what a picker there lists of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.epp_io import FakeEngine, RunningPicker, engines, until
from support.kube_api import MODELS, PODS, POOLS, FakeApi, fake_api, own_pool, pod

NS = "team"
PODS_OF, POOLS_OF, MODELS_OF = PODS.format(NS), POOLS.format(NS), MODELS.format(NS)
UPSTREAM_OF = f"/apis/inference.networking.k8s.io/v1/namespaces/{NS}/inferencepools"
LOCAL = {"ip": "127.0.0.1"}


@dataclass
class Cluster:
    """A fake API server and engines that its pods stand for; pool ``p<i>`` has pod ``pod-<i>`` on engine i's port."""

    api: FakeApi
    engines: list[FakeEngine]
    folder: Path

    def put(self, path: str, obj: dict[str, Any]) -> None:
        self.api.change(path, lambda c: c.put(obj))

    def delete(self, path: str, name: str) -> None:
        self.api.change(path, lambda c: c.delete(name))

    def put_pod(self, i: int, **fields: Any) -> None:
        labels = {"treeline.dev/pool": f"p{i}", "app": "x", **fields.pop("labels", {})}
        self.put(PODS_OF, pod(f"pod-{i}", labels=labels, **{**LOCAL, **fields}))

    def flags(self, *more: str) -> tuple[str, ...]:
        which = more or ("--gateway", "treeline")
        return ("--kubeconfig", str(self.api.kubeconfig(self.folder)), "--pool-namespace", NS, *which)


@contextlib.asynccontextmanager
async def cluster(folder: Path, count: int = 2) -> AsyncIterator[Cluster]:
    async with fake_api() as api, engines(count) as fakes:
        made = Cluster(api, fakes, folder)
        api.collection(MODELS_OF)
        for i, fake in enumerate(fakes):
            fake.models = (f"m{i}",)
            made.put(POOLS_OF, own_pool(f"p{i}", port=fake.port, model=f"m{i}"))
            made.put_pod(i)
        yield made


async def listing(picker: RunningPicker) -> dict[str, Any]:
    return dict((await picker.get("/endpoints")).json())


async def endpoint(picker: RunningPicker, name: str) -> dict[str, Any] | None:
    pools = (await listing(picker))["pools"].values()
    return next((e for pool in pools for e in pool["endpoints"] if e["name"] == name), None)


async def ready_is(picker: RunningPicker, name: str, **fields: Any) -> None:
    """Wait until an endpoint is listed so; without fields, until it is not listed."""

    async def so() -> bool:
        found = await endpoint(picker, name)
        return found is None if not fields else found is not None and fields.items() <= found.items()

    await until(so, f"{name} is {fields or 'gone'}")
