"""Clients notice nothing of a killed picker if a real Envoy has another one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.epp_io import FakeEngine, Plane, data_plane, engines, until
from support.http import client
from support.ports import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.deep]

Killable = asyncio.subprocess.Process
QUESTION = {"model": "tiny", "prompt": "long"}


@contextlib.asynccontextmanager
async def plane_with_a_killable_picker(
    folder: Path, fakes: list[FakeEngine], *, beside_another: bool, **settings: Any
) -> AsyncIterator[tuple[Plane, Killable]]:
    """Run an Envoy that asks a killable picker in a process of its own, in turns with another one if given. Envoy never
    checks the health of either, so only failed requests reveal a death."""
    grpc, *others = free_ports(4)
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port")
    words = [word for flag, port in zip(flags, (grpc, *others), strict=True) for word in (flag, str(port))]
    words += [word for fake in fakes for word in ("--endpoint", f"{fake.name}={fake.address}")]
    killable = await asyncio.create_subprocess_exec(sys.executable, "-m", "treeline_epp", *words)

    def patch(bootstrap: dict[str, Any]) -> None:
        (cluster,) = [c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "ext_proc"]
        del cluster["health_checks"]
        hosts = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        own = copy.deepcopy(hosts[0])
        own["endpoint"]["address"]["socket_address"]["port_value"] = grpc
        hosts[:] = [*hosts, own] if beside_another else [own]

    try:

        async def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with client() as http:
                    return (await http.get(f"http://127.0.0.1:{others[2]}/ready")).status_code == 200
            return False

        await until(ready, "the picker is ready")
        async with data_plane(folder, fakes, patch=patch, message_timeout_s=60, **settings) as plane:
            yield plane, killable
    finally:
        with contextlib.suppress(ProcessLookupError):
            killable.kill()
        await killable.wait()


@pytest.mark.parametrize("fail_open", [False, True], ids=["FailClose", "FailOpen"])
async def test_requests_of_a_dying_picker_move_to_another(tmp_path: Path, fail_open: bool) -> None:
    async with (
        engines(1) as fakes,
        plane_with_a_killable_picker(tmp_path, fakes, beside_another=True, fail_open=fail_open) as (plane, picker),
    ):
        assert [(await plane.complete()).status_code for _ in range(4)] == [200] * 4
        picker.send_signal(signal.SIGSTOP)
        asked = [asyncio.create_task(plane.complete()) for _ in range(20)]
        await until(lambda: sum(task.done() for task in asked) == 10, "every second request waits for the stopped one")
        picker.kill()
        await picker.wait()
        answers = [*await asyncio.gather(*asked), *[await plane.complete() for _ in range(20)]]
        assert [answer.status_code for answer in answers] == [200] * 40
        picked = [seen.headers.get("x-gateway-destination-endpoint") for seen in fakes[0].served]
        assert picked == [fakes[0].address] * 44, "a picker was asked for each"


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
async def test_a_running_answer_outlives_its_picker_and_later_requests_are_refused(tmp_path: Path, mode: str) -> None:
    settings = {"fail_open": False, "response_body_mode": mode}
    async with (
        engines(1) as fakes,
        plane_with_a_killable_picker(tmp_path, fakes, beside_another=False, **settings) as (plane, picker),
    ):
        fakes[0].hold_body = asyncio.Event()
        async with plane.http.stream("POST", "/v1/completions", json=QUESTION) as answer:
            assert answer.status_code == 200
            picker.kill()
            await picker.wait()
            refused = await plane.complete()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "picker_unavailable"
            fakes[0].hold_body.set()
            assert b'"path": "/v1/completions"' in await answer.aread()
        assert len(fakes[0].served) == 1, "what no picker has seen reaches no engine"


async def test_clients_name_no_engine_where_no_picker_removes_their_headers(tmp_path: Path) -> None:
    named = ("x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port")
    named += ("x-kv-cache-source-host-port", "x-treeline-pages-from")
    async with (
        engines(1) as fakes,
        plane_with_a_killable_picker(tmp_path, fakes, beside_another=False, fail_open=True) as (plane, picker),
    ):
        picker.kill()
        await picker.wait()
        assert await plane.status(headers={**dict.fromkeys(named, "10.9.9.9:80"), "x-session-id": "kept"}) == 200
        got = fakes[0].served[-1].headers
        assert "x-gateway-destination-endpoint" not in got, "it fails open"
        assert got["x-session-id"] == "kept"
        assert not set(named) & set(got)
