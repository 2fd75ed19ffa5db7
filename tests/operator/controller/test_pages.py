"""Metrics, health pages, Events and logs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from support.virtual_loop import run
from treeline_kube.errors import Forbidden
from treeline_operator.controller.health import Pages, PortInUse, Vitals
from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.queue import Outcome
from treeline_operator.controller.recorder import Recorder
from treeline_operator.world import Key, Ref

POOL = Ref("treeline.dev/v1alpha1", "InferencePool", "n", "p")


def test_metrics_report_work_and_state() -> None:
    metrics = Metrics()
    metrics.finished(Key("pool", "n", "p"), Outcome("changed"), 0.2, 0.03)
    metrics.finished(Key("pool", "n", "p"), Outcome("conflict", retry=True), 0.2, 0.03)
    metrics.requested("patch", "deployments", 200, 0.01)
    metrics.drifted("Service")
    metrics.dropped("rate")
    metrics.leads(True)
    metrics.depth, metrics.watch_ages = lambda: 7, lambda: {"v1/Pod": 3.5}
    metrics.conditions(POOL, [{"type": "Ready", "status": "False", "reason": "PodsStarting"}])
    metrics.conditions(POOL._replace(name="q"), [{"type": "Ready", "status": "False", "reason": "PodsStarting"}])
    metrics.conditions(POOL._replace(name="q"), [])
    text = metrics.text().decode()
    for line in (
        'treeline_operator_reconciles_total{kind="pool",result="changed"} 1.0',
        'treeline_operator_retries_total{kind="pool"} 1.0',
        'treeline_operator_api_requests_total{code="200",resource="deployments",verb="patch"} 1.0',
        'treeline_operator_drift_corrected_total{kind="Service"} 1.0',
        'treeline_operator_events_dropped_total{why="rate"} 1.0',
        "treeline_operator_is_leader 1.0",
        "treeline_operator_queue_depth 7.0",
        'treeline_operator_watch_age_seconds{kind="v1/Pod"} 3.5',
        'treeline_operator_conditions{kind="InferencePool",name="p",namespace="n",'
        'reason="PodsStarting",status="False",type="Ready"} 1.0',
    ):
        assert line in text, line


async def test_pages_distinguish_health_and_readiness() -> None:
    ages, oldest = {"v1/Pod": 5.0}, 0.0
    vitals = Vitals(watch_ages=lambda: ages, oldest_key=lambda: oldest, troubles=lambda: ["pods: forbidden"])
    pages = await Pages(vitals, Metrics()).open("127.0.0.1", 0, 0)
    health, metrics = pages.ports()

    async def get(path: str, port: int = health) -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, await answer.text()

    async with aiohttp.ClientSession() as session:
        assert await get("/healthz") == (200, "ok: starting\n")
        assert (await get("/readyz"))[0] == 503
        vitals.phase = "standby"
        assert await get("/readyz") == (200, "ok: standby\n")
        vitals.phase = "syncing"
        assert await get("/readyz") == (503, "syncing\npods: forbidden\n")
        vitals.phase = "leading"
        assert await get("/readyz") == (200, "ok: leading\n")
        ages["v1/Pod"] = 300.0
        assert await get("/healthz") == (503, "no news of v1/Pod for 300 s\n")
        ages["v1/Pod"], oldest = 1.0, 4000.0
        assert "4000 s" in (await get("/healthz"))[1]
        assert (await get("/metrics", metrics))[0] == 200
        assert (await get("/metrics"))[0] == 404
    with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{metrics} .*--metrics-port"):
        await Pages(vitals, Metrics()).open("127.0.0.1", 0, metrics)
    await pages.close()


class Api:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.fault: Exception | None = None

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        if self.fault is not None:
            raise self.fault
        self.events.append(obj)
        return obj


def test_events_are_few_and_never_repeated() -> None:
    async def main() -> None:
        api, metrics = Api(), Metrics()
        recorder = Recorder(api, metrics, "me", lambda: datetime(2026, 11, 1, tzinfo=UTC))
        task = asyncio.create_task(recorder.run())
        for _ in range(3):
            recorder.emit(POOL, "u", "Normal", "Created", "Created Service p-pods")
        recorder.emit(POOL, "other", "Normal", "Created", "Created Service p-pods")
        await recorder.flush(1)
        assert len(api.events) == 2
        first = api.events[0]
        assert first["involvedObject"] == {
            "apiVersion": POOL.api_version,
            "kind": "InferencePool",
            "namespace": "n",
            "name": "p",
            "uid": "u",
        }
        assert first["metadata"]["namespace"] == "n"
        assert first["firstTimestamp"] == "2026-11-01T00:00:00Z"
        await asyncio.sleep(601)
        recorder.emit(POOL, "u", "Normal", "Created", "Created Service p-pods")
        await recorder.flush(1)
        assert len(api.events) == 3, "after ten minutes it is news again"
        for number in range(100):
            recorder.emit(POOL, "u", "Warning", "ReconcileFailed", f"{number} " + "x" * 5000)
        await recorder.flush(1)
        assert len(api.events) == 3 + 19
        assert len(api.events[-1]["message"]) == 1000
        assert b'events_dropped_total{why="rate"} 81.0' in metrics.text()
        api.fault = Forbidden("403", code=403)
        recorder.emit(POOL, "third", "Normal", "Created", "x")
        await recorder.flush(1)
        api.fault = None
        recorder.emit(POOL, "fourth", "Normal", "Created", "x")
        await recorder.flush(1)
        assert len(api.events) == 23, "a refusal does not end the recorder"
        task.cancel()

    run(main())


def test_an_event_that_cannot_be_written_is_not_waited_for() -> None:
    async def main() -> None:
        class Stuck(Api):
            async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
                await asyncio.sleep(1e6)
                return obj

        metrics = Metrics()
        recorder = Recorder(Stuck(), metrics, "me", lambda: datetime(2026, 11, 1, tzinfo=UTC))
        task = asyncio.create_task(recorder.run())
        for number in range(1100):
            recorder.emit(POOL, f"u{number}", "Normal", "Created", "x")
        await recorder.flush(2)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        assert b'why="backlog"} 100.0' in metrics.text()
        task.cancel()

    run(main())
