"""Several operators at once on a real API server: leading, ending, taking over; and the process of each."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from aiohttp import web
from support.kube_proxy import KubeProxy
from support.operator_run import DEPLOYMENTS, POOLS, Room, operator, quiet, runtime, settled, versions
from support.ports import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.deep]

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


async def test_a_leader_that_freezes_midway_steps_down_and_the_next_one_completes_its_work(
    room: Room, tmp_path: Path
) -> None:
    async with KubeProxy(room.plane.admin, tmp_path) as proxy:

        def freeze(request: web.Request) -> web.Response | None:
            # The first Deployment is written, and then nothing goes through any more, the lease included.
            if request.method == "PATCH" and "deployments" in request.path:
                proxy.open.clear()
            return None

        proxy.fault = freeze
        async with operator(proxy.kubeconfig, room.namespace, identity="first", leader_elect=True) as first:
            await room.until(lambda: holder(room, "first"), "the first to lead")
            async with operator(room.plane.admin, room.namespace, identity="second", leader_elect=True) as second:
                await room.create_pool("a")
                await room.until(lambda: holder(room, "second"), "the second to lead")
                assert not first.done(), "it stands by"
                await settled(room)
                deployments = [d["metadata"]["name"] for d in await room.items(DEPLOYMENTS)]
                assert len(deployments) == 3, "one revision, one picker, one Envoy"
                assert not second.done()


async def holder(room: Room, identity: str) -> bool:
    lease = await room.get(f"{LEASES}/treeline-operator")
    return lease is not None and lease["spec"]["holderIdentity"].startswith(identity)


async def test_an_operator_without_the_lease_writes_nothing_until_it_has_it_again(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "treeline_operator.controller.run")

    def led() -> int:
        return sum(record.getMessage() == "leading" for record in caplog.records)

    async with operator(room.plane.admin, room.namespace, leader_elect=True) as running:
        await room.until(lambda: holder(room, "one"), "it to lead")
        thief = {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 3600}}
        await room.patch(f"{LEASES}/treeline-operator", thief)
        await room.until(lambda: "held by thief; another replica may lead" in caplog.text, "it to stand by")
        await room.create_pool("a")
        await room.patch(f"{LEASES}/treeline-operator", {"spec": {"holderIdentity": ""}})
        await room.until(lambda: led() == 2, "it to lead again")
        await settled(room)
        assert not running.done()


async def test_two_operators_at_once_agree(room: Room, tmp_path: Path) -> None:
    """Without a lease (or in the moment when two believe they hold it) they write the same: nothing flaps."""
    async with (
        KubeProxy(room.plane.admin, tmp_path) as proxy,
        operator(proxy.kubeconfig, room.namespace, resync_s=0.3),
        operator(proxy.kubeconfig, room.namespace, resync_s=0.3, identity="two"),
    ):
        await room.create_pool("a")
        await settled(room)
        await quiet(proxy)
        before = await versions(room)
        await room.patch(f"{POOLS}/a", {"spec": {"replicas": 2}})
        await room.until(lambda: room_replicas(room, 2), "the new number of replicas")
        await quiet(proxy)
        after = await versions(room)
        changed = {name for name in after if after[name] != before[name]}
        assert {name.partition("/")[0] for name in changed} == {"deployments"}


async def room_replicas(room: Room, count: int) -> bool:
    return (await runtime(room))["spec"]["replicas"] == count


async def test_the_process_reports_its_health_and_ends_in_order(room: Room) -> None:
    """The operator as a process: its pages, its memory, a standby, SIGTERM, the handover of the lease."""
    command = [sys.executable, "-m", "treeline_operator", "--kubeconfig", str(room.plane.admin)]
    command += ["--namespace", room.namespace, "--lease-namespace", room.namespace, "--host", "127.0.0.1"]
    ports = free_ports(4)
    one, two = await asyncio.gather(spawn(command, *ports[:2]), spawn(command, *ports[2:]))
    replicas = [(one, *ports[:2]), (two, *ports[2:])]
    try:

        def roles() -> list[str]:
            return [page(health, "/readyz") for _, health, _ in replicas]

        await room.until(lambda: sorted(roles()) == ["ok: leading", "ok: standby"], "one to lead", 90.0)
        leader, standby = sorted(replicas, key=lambda replica: page(replica[1], "/readyz"))
        assert page(leader[1], "/healthz") == "ok: leading"
        figures = page(leader[2], "/metrics")
        assert "treeline_operator_is_leader 1.0" in figures
        assert 'treeline_operator_watch_age_seconds{kind="apps/v1/Deployment"}' in figures
        assert "treeline_operator_is_leader 0.0" in page(standby[2], "/metrics")
        assert psutil.Process(leader[0].pid).memory_info().rss < 90 << 20
        leader[0].send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(leader[0].wait(), 60) == 0
        await room.until(lambda: page(standby[1], "/readyz") == "ok: leading", "the hand-over")
    finally:
        await kill(one, two)


async def spawn(command: list[str], health: int, metrics: int) -> asyncio.subprocess.Process:
    ports = ["--health-port", str(health), "--metrics-port", str(metrics)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return await asyncio.create_subprocess_exec(*command, *ports, env=environment, stderr=asyncio.subprocess.PIPE)


async def kill(*processes: asyncio.subprocess.Process) -> None:
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def page(port: int, path: str) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=60).text.strip()
    except httpx.TransportError:
        return ""
