"""The picker on a real API server: objects made and changed through the API, restarts of the server, rights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest
from support.control_plane import ControlPlane
from support.epp_io import FakeEngine, RunningPicker, engines, equal, running_picker, so, until
from support.epp_kube import Cluster, asked, listed, listed_so
from support.kube_api import MODELS, PODS, POOLS
from treeline_kube import reflector
from treeline_operator.rbac import PICKER

pytestmark = [pytest.mark.integration, pytest.mark.deep]


@contextlib.asynccontextmanager
async def serving(
    control_plane: ControlPlane, namespace: str, count: int = 1
) -> AsyncIterator[tuple[Cluster, list[FakeEngine]]]:
    """Create pools ``p<i>`` of one pod each, ``pod-<i>``, which is engine ``i`` with model ``m<i>``."""
    cluster = Cluster(control_plane, namespace)
    async with engines(count) as fakes:
        for i, fake in enumerate(fakes):
            fake.models = (f"m{i}",)
            await cluster.create_pool(f"p{i}", fake.port, model=f"m{i}")
            await cluster.create_pod(f"pod-{i}", {"treeline.dev/pool": f"p{i}", "app": "x"})
        yield cluster, fakes


async def test_pods_and_models_are_followed(control_plane: ControlPlane, namespace: str) -> None:
    async with serving(control_plane, namespace, 2) as (cluster, fakes), running_picker(*cluster.flags()) as picker:
        await listed_so(picker, "pod-0", ready=True, address=fakes[0].address)
        assert await asked(picker, "m0") == fakes[0].address
        assert await asked(picker, "chat") == 404

        await cluster.create_model("chat", "p0")
        await until(lambda: equal(asked(picker, "chat"), fakes[0].address), "the model is known")
        await cluster.merge(MODELS, "chat", {"spec": {"poolRef": {"name": "p1"}}})
        await until(lambda: equal(asked(picker, "chat"), fakes[1].address), "it has moved")
        await cluster.merge(MODELS, "chat", {"metadata": {"finalizers": ["tests.example/kept"]}})
        await cluster.delete(MODELS, "chat")
        await until(lambda: equal(asked(picker, "chat"), 404), "it is gone, though its object is not")
        await cluster.merge(MODELS, "chat", {"metadata": {"finalizers": None}})

        await cluster.merge(PODS, "pod-1", {"metadata": {"labels": {"treeline.dev/serving": "false"}}})
        await listed_so(picker, "pod-1", ready=False, draining=True)
        assert await asked(picker, "m1") == 503
        await cluster.merge(PODS, "pod-1", {"metadata": {"labels": {"treeline.dev/serving": "true"}}})
        await listed_so(picker, "pod-1", ready=True)
        await cluster.set_status("pod-1", ready=False)
        await listed_so(picker, "pod-1", ready=False, draining=False)
        await cluster.set_status("pod-1", restarts=1)
        await listed_so(picker, "pod-1", ready=True)

        await cluster.delete(PODS, "pod-0")
        await listed_so(picker, "pod-0", ready=False, draining=True)
        await cluster.delete(PODS, "pod-0", gracePeriodSeconds=0)
        await listed_so(picker, "pod-0")
        await cluster.delete(POOLS, "p1")
        await listed_so(picker, "pod-1")
        assert (await picker.get("/ready")).json()["kubernetes"]["stale"] == []


async def listed_without_load(picker: RunningPicker) -> dict[str, dict[str, object]]:
    """Return the endpoints without their requests in flight, which a cancelled probe updates only a moment later."""
    return {
        name: {field: value for field, value in endpoint.items() if field != "in_flight"}
        for name, endpoint in (await listed(picker)).items()
    }


@contextlib.asynccontextmanager
async def restarting(control_plane: ControlPlane) -> AsyncIterator[asyncio.Task[None]]:
    """Restart the API server during the block. It is back after the block, even after a failure: other tests share
    it."""
    restarted = asyncio.create_task(asyncio.to_thread(control_plane.restart_apiserver))
    try:
        yield restarted
    finally:
        await restarted


async def test_a_restart_of_the_api_server_has_no_effect_on_requests(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "Timing", partial(reflector.Timing, backoff_s=(0.2, 1.0)))
    # While it installs its kinds, the server says 503 and "in 5 s".
    monkeypatch.setattr(reflector, "LONGEST_RETRY_AFTER_S", 0.5)
    async with serving(control_plane, namespace) as (cluster, fakes), running_picker(*cluster.flags()) as picker:
        await listed_so(picker, "pod-0", ready=True)
        before = await listed_without_load(picker)
        stale = 0
        async with restarting(control_plane) as restarted:
            while not restarted.done():
                assert await asked(picker, "m0") == fakes[0].address
                assert await listed_without_load(picker) == before
                answer = await picker.get("/ready")
                assert answer.status_code == 200
                stale = max(stale, len(answer.json()["kubernetes"]["stale"]))
                await asyncio.sleep(0.05)
        assert stale == 3, "it says that nothing is followed"
        await until(
            lambda: so(picker.get("/ready"), lambda it: it.json()["kubernetes"]["stale"] == []),
            "all kinds are followed again",
        )
        await cluster.create_model("chat", "p0")
        await until(lambda: equal(asked(picker, "chat"), fakes[0].address), "changes arrive again")


async def test_a_hanging_api_server_has_no_effect_on_requests(control_plane: ControlPlane, namespace: str) -> None:
    async with serving(control_plane, namespace) as (cluster, fakes), running_picker(*cluster.flags()) as picker:
        await listed_so(picker, "pod-0", ready=True)
        control_plane.pause("apiserver")
        try:
            for _ in range(5):
                assert await asked(picker, "m0") == fakes[0].address
        finally:
            control_plane.resume("apiserver")
        await cluster.create_model("chat", "p0")
        await until(lambda: equal(asked(picker, "chat"), fakes[0].address), "changes arrive")


@pytest.mark.parametrize("models_allowed", [True, False])
async def test_the_role_that_the_operator_grants_is_enough_and_models_are_optional(
    control_plane: ControlPlane, namespace: str, models_allowed: bool
) -> None:
    async with serving(control_plane, namespace) as (cluster, fakes):
        await cluster.create_model("chat", "p0")
        rules = [need.rule() for need in PICKER]
        if not models_allowed:
            for rule in rules:
                rule["resources"] = [r for r in rule["resources"] if r != "inferencemodels"]
        user = f"picker-{namespace}"
        await cluster.grant(user, rules)
        async with running_picker(*cluster.flags(user=user)) as picker:
            await listed_so(picker, "pod-0", ready=True)
            assert await asked(picker, "m0") == fakes[0].address
            assert await asked(picker, "chat") == (fakes[0].address if models_allowed else 404)
            detail = (await picker.get("/ready")).json()["kubernetes"]
            assert detail["stale"] == ([] if models_allowed else ["inferencemodels.treeline.dev"])
        used = {
            (e["objectRef"]["resource"], e["verb"], e["responseStatus"]["code"])
            for e in control_plane.audit_events(user)
        }
        assert {verb for _, verb, _ in used} == {"list", "watch"}
        refused = {resource for resource, _, code in used if code == 403}
        assert refused == (set() if models_allowed else {"inferencemodels"})
        assert {resource for resource, _, _ in used} == {"pods", "inferencepools", "inferencemodels"}
