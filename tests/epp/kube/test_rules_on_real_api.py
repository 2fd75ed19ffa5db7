"""Objectives and rewrites on a real API server, with upstream's published kinds and an operator's rights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.control_plane import ControlPlane
from support.epp_io import RunningPicker, engines, equal, running_picker, until
from support.epp_kube import Cluster, asked, listed_so
from support.kube_api import crd
from treeline_epp.kube.source import KubernetesSource, Scope
from treeline_kube import reflector
from treeline_kube.client import Client
from treeline_operator.rbac import PICKER, RULES_GROUPS, rules_need
from treeline_wire.gateway_rules import ModelRewrite, Objective, RewriteRule

pytestmark = [pytest.mark.integration, pytest.mark.deep]

CRDS = Path(__file__).parents[3] / "e2e/gateway_api/crds/inference-extension"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
EXTENSION, LLM_D = RULES_GROUPS
KINDS = {"inferenceobjectives": "InferenceObjective", "inferencemodelrewrites": "InferenceModelRewrite"}


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The shared control plane, with upstream's own definitions and a stand-in for llm-d's, which we do not have."""
    made = control_plane.install_crds(*(CRDS / f"{EXTENSION}_{plural}.yaml" for plural in KINDS))
    for plural, kind in KINDS.items():
        obj = crd(LLM_D, "v1alpha2", kind, plural)
        control_plane.request("POST", DEFINITIONS, obj)
        made.append(obj["metadata"]["name"])
    yield control_plane
    for name in made:
        control_plane.request("DELETE", f"{DEFINITIONS}/{name}")


class Rules(Cluster):
    """Makes objects of one group, and deletes them."""

    group = EXTENSION

    def path(self, plural: str) -> str:
        return f"/apis/{self.group}/v1alpha2/namespaces/{self.namespace}/{plural}"

    async def make(self, plural: str, name: str, pool: str, pool_group: str = "treeline.dev", **spec: Any) -> None:
        ref = {"name": pool} | ({"group": pool_group} if pool_group else {})
        obj = {"apiVersion": f"{self.group}/v1alpha2", "kind": KINDS[plural], "metadata": {"name": name}}
        await self.create(self.path(plural), obj | {"spec": {"poolRef": ref, **spec}})

    async def rewrite(self, name: str, pool: str, model: str, target: str, pool_group: str = "treeline.dev") -> None:
        rule = {"matches": [{"model": {"value": model}}], "targets": [{"modelRewrite": target}]}
        await self.make("inferencemodelrewrites", name, pool, pool_group, rules=[rule])


@pytest.fixture
def rules(plane: ControlPlane, namespace: str) -> Rules:
    return Rules(plane, namespace)


async def answers(picker: RunningPicker, model: str, expected: object) -> None:
    await until(lambda: equal(asked(picker, model), expected), f"a request for {model} goes to {expected}")


@pytest.mark.parametrize("group", RULES_GROUPS)
async def test_a_rewrite_acts_while_it_exists_with_the_operators_rights(rules: Rules, group: str) -> None:
    rules.group = group
    user = f"picker-{rules.namespace}"
    await rules.grant(user, [need.rule() for need in (*PICKER, rules_need(group))])
    async with engines(2) as fakes:
        for i, fake in enumerate(fakes):
            fake.models = (f"m{i}",)
            await rules.create_pool(f"p{i}", fake.port, model=f"m{i}")
            await rules.create_pod(f"pod-{i}", {"treeline.dev/pool": f"p{i}"})
        flags = rules.flags("--gateway", "treeline", "--rules-group", group, user=user)
        async with running_picker(*flags) as picker:
            for i, fake in enumerate(fakes):
                await listed_so(picker, f"pod-{i}", ready=True, address=fake.address)
            assert await asked(picker, "chat") == 404
            await rules.rewrite("of-another-api", "p1", "chat", "m1", pool_group="")
            await rules.rewrite("chat", "p0", "chat", "m0")
            await answers(picker, "chat", fakes[0].address)
            targets = [{"matches": [{"model": {"value": "chat"}}], "targets": [{"modelRewrite": "m1"}]}]
            moved = {"spec": {"poolRef": {"name": "p1"}, "rules": targets}}
            await rules.merge(rules.path("inferencemodelrewrites"), "chat", moved)
            await answers(picker, "chat", fakes[1].address)
            await rules.delete(rules.path("inferencemodelrewrites"), "chat")
            await answers(picker, "chat", 404)
            assert (await picker.get("/ready")).json()["kubernetes"]["stale"] == []
    events = rules.plane.audit_events(user)
    assert {e["objectRef"]["resource"] for e in events} == {"pods", "inferencepools", "inferencemodels", *KINDS}
    assert [e["requestURI"] for e in events if e["responseStatus"]["code"] == 403] == []


Told = tuple[list[Objective], list[ModelRewrite]]


class Listener:
    """Records the rules that a source reports, and waits for given ones."""

    def __init__(self) -> None:
        self.told: Told = ([], [])
        self._changed = asyncio.Event()

    def __call__(self, objectives: Any, rewrites: Any) -> None:
        self.told = (list(objectives), list(rewrites))
        self._changed.set()

    async def tells(self, objectives: dict[str, int], rewrites: set[str]) -> None:
        async with asyncio.timeout(60):
            while ({one.name: one.priority for one in self.told[0]}, {one.name for one in self.told[1]}) != (
                objectives,
                rewrites,
            ):
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def following(rules: Rules) -> AsyncIterator[tuple[KubernetesSource, Listener]]:
    """Run a source of the pool ``p``, whose endpoints are consumed."""
    client, listener = await Client.from_config(rules.plane.admin, None), Listener()
    scope = Scope(rules.namespace, pool="p", rules_group=rules.group)
    async with KubernetesSource(scope, client, lambda _pools, _models: None, listener) as source:

        async def drain() -> None:
            async for _ in source.specs():
                pass

        task = asyncio.create_task(drain())
        try:
            yield source, listener
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_reported_rules_equal_the_objects_through_changes_and_a_restart(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It includes changes made while the API server was away, and defaults of upstream's definitions."""
    monkeypatch.setattr(reflector, "Timing", partial(reflector.Timing, backoff_s=(0.2, 1.0)))
    monkeypatch.setattr(reflector, "LONGEST_RETRY_AFTER_S", 0.5)
    await rules.create_pool("p", 8000)
    objectives = "inferenceobjectives"
    async with following(rules) as (source, listener):
        await rules.make(objectives, "urgent", "p", priority=7)
        await rules.make(objectives, "plain", "p")
        await rules.make(objectives, "elsewhere", "q", priority=1)
        await rules.make(objectives, "by-mirror", "p-gie", "", priority=2)
        await rules.make(objectives, "of-no-mirror", "p", "", priority=3)
        await rules.rewrite("chat", "p", "chat", "m")
        await listener.tells({"urgent": 7, "plain": 0, "by-mirror": 2}, {"chat"})
        assert {one.pool for one in listener.told[0]} == {"p"}
        (rewrite,) = listener.told[1]
        assert rewrite.rules == (RewriteRule((("m", 0),), frozenset({"chat"})),)
        assert (rewrite.pool, len(rewrite.created)) == ("p", len("2026-11-01T00:00:00Z"))

        await rules.merge(rules.path(objectives), "urgent", {"spec": {"priority": -7}})
        await rules.merge(rules.path(objectives), "elsewhere", {"spec": {"poolRef": {"name": "p"}}})
        await listener.tells({"urgent": -7, "plain": 0, "elsewhere": 1, "by-mirror": 2}, {"chat"})

        await asyncio.to_thread(rules.plane.restart_apiserver)
        await rules.delete(rules.path(objectives), "plain")
        await rules.delete(rules.path("inferencemodelrewrites"), "chat")
        await listener.tells({"urgent": -7, "elsewhere": 1, "by-mirror": 2}, set())
        assert set(source.describe()["kinds"]) >= {f"{plural}.{EXTENSION}" for plural in KINDS}  # type: ignore[call-overload]
