"""A pool that is scaled by its picker's counts: real picker, API server and controllers, and a fake engine."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from support.epp_io import FakeEngine, RunningPicker, running_picker
from support.epp_kube import asked
from support.operator_run import PODS, POOLS, Room, condition, operator, ready
from treeline_epp import signals
from treeline_kube.client import Client
from treeline_kube.errors import Conflict
from treeline_operator.controller import scaler
from treeline_operator.world import Ref

pytestmark = [pytest.mark.integration, pytest.mark.deep]

AUTO = {"type": "Picker", "minReplicas": 0, "maxReplicas": 3, "picker": {"scaleDownSeconds": 3600}}
HPAS = "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers"


async def pods_of(room: Room, component: str) -> list[Any]:
    return [p for p in await room.items(PODS) if p["metadata"]["labels"].get("treeline.dev/component") == component]


async def run_pods(room: Room, component: str) -> None:
    """Act as a kubelet for this component's pods: each is ready as soon as it exists."""
    told = set()
    while True:
        for pod in await pods_of(room, component):
            if pod["metadata"]["uid"] not in told:
                told.add(pod["metadata"]["uid"])
                await ready(room, pod)
        await asyncio.sleep(0.05)


async def replicas(room: Room) -> int:
    return int((await room.pool("a"))["spec"]["replicas"])


async def scaling(room: Room) -> dict[str, Any]:
    return condition(await room.pool("a"), "ScalingActive")


async def test_a_request_wakes_a_pool_and_idleness_puts_it_to_sleep(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is forgotten, and nothing taken away, before the story says so: however slow the machine is.
    monkeypatch.setattr(signals, "RECENT_S", 3600.0)
    monkeypatch.setattr(scaler, "_OWNERS_S", 0.5)
    monkeypatch.setattr(scaler, "_LOOK_S", 0.2)
    engine = FakeEngine()
    await engine.start()
    scope = ("--kubeconfig", str(room.plane.admin), "--gateway", "treeline", "--pool-namespace", room.namespace)
    async with running_picker(*scope, ready=False) as picker:
        port = picker.options.admin_port
        async with operator(room.plane.admin, room.namespace, picker_port=port):
            spec = {"engine": {"port": engine.port}, "replicas": 0, "autoscaling": AUTO}
            await room.create_pool("a", **spec)
            kubelets = [asyncio.create_task(run_pods(room, name)) for name in ("epp", "runtime")]
            try:
                await story(room, picker, engine, monkeypatch)
            finally:
                for task in kubelets:
                    task.cancel()
                await asyncio.gather(*kubelets, return_exceptions=True)
                await engine.stop()


async def story(room: Room, picker: RunningPicker, engine: FakeEngine, patch: pytest.MonkeyPatch) -> None:
    async def active() -> bool:
        return (await scaling(room)).get("reason") == "AutoscalerActive"

    await room.until(active, "the picker to be heard")
    assert await replicas(room) == 0

    assert await asked(picker, "tiny") == 503

    async def woken() -> bool:
        return await replicas(room) > 0

    await room.until(woken, "the pool to be woken")

    async def told() -> bool:
        return "autoscaling" in (await room.pool("a"))["status"]

    await room.until(told, "the figures")

    async def said() -> list[str]:
        events = await room.items("/api/v1/namespaces/{}/events")
        return [e["message"] for e in events if e["reason"] == "Autoscaled"]

    first, *_ = await room.until(said, "the Event of it")
    assert re.fullmatch(r"replicas 0 → 1: \d+ requests? found no pod ready", first)

    async def served() -> bool:
        return await asked(picker, "tiny") == engine.address

    await room.until(served, "the engine to be picked")

    patch.setattr(signals, "RECENT_S", 0.0)
    await room.patch(f"{POOLS}/a", {"spec": {"autoscaling": {"picker": {"scaleDownSeconds": 0}}}})

    async def asleep() -> bool:
        return await replicas(room) == 0

    await room.until(asleep, "the pool to go to sleep")

    target = {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "name": "a"}
    theirs = {"metadata": {"name": "theirs"}, "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2}}
    await room.request("POST", HPAS.format(room.namespace), theirs)

    async def left() -> bool:
        return (await scaling(room)).get("reason") == "ScaledByAnother"

    await room.until(left, "the pool to be left to its other autoscaler")
    assert "HorizontalPodAutoscaler theirs" in (await scaling(room))["message"]


async def test_only_the_observed_pool_is_scaled(room: Room) -> None:
    before = (await room.create_pool("a"))["metadata"]["resourceVersion"]
    await room.patch(f"{POOLS}/a", {"spec": {"replicas": 2}})
    after = (await room.pool("a"))["metadata"]["resourceVersion"]
    ref = Ref("treeline.dev/v1alpha1", "InferencePool", room.namespace, "a")
    client = await Client.from_config(room.plane.admin, None)
    try:
        with pytest.raises(Conflict):
            await client.scale_by_subresource(ref, before, 7)
        assert await replicas(room) == 2
        await client.scale_by_subresource(ref, after, 7)
        assert await replicas(room) == 7
    finally:
        await client.close()
