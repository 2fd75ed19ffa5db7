"""A picker of several worker processes, and what asks it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from treeline_epp.extproc.server import SERVICE

from support.epp_io import FakeEngine, until
from support.http import client
from support.picker_cost import messages_of
from support.ports import free_ports

HOST = "127.0.0.1"


@dataclass
class PickerOfWorkers:
    """A picker of workers as a process, by its ports."""

    process: asyncio.subprocess.Process
    grpc_port: int
    control_port: int
    metrics_port: int
    admin_port: int
    log: Path

    @property
    def workers(self) -> list[psutil.Process]:
        return [one for one in psutil.Process(self.process.pid).children() if one.status() != psutil.STATUS_ZOMBIE]

    async def page(self, path: str) -> Any:
        async with client(timeout=60) as http:
            return await http.get(f"http://{HOST}:{self.admin_port}{path}")

    async def metrics(self) -> dict[str, float]:
        async with client(timeout=60) as http:
            page = await http.get(f"http://{HOST}:{self.metrics_port}/metrics")
        lines = (line.rsplit(" ", 1) for line in page.text.splitlines() if line[:1] not in ("", "#"))
        return {name: float(value) for name, value in lines}

    async def ready(self) -> bool:
        assert self.process.returncode is None, self.log.read_text()
        with contextlib.suppress(OSError, Exception):
            return (await self.page("/ready")).status_code == 200
        return False


@contextlib.asynccontextmanager
async def picker_of_workers(folder: Path, engines: Sequence[FakeEngine], *words: str) -> AsyncIterator[PickerOfWorkers]:
    ports = free_ports(4)
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port")
    argv = [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]
    log = folder / "picker.log"
    named = [word for engine in engines for word in ("--endpoint", f"{engine.name}={engine.address}")]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "treeline_epp", *named, "--workers", "2"),
            *(*argv, "--drain-timeout", "3", *words),
            stderr=out,
            start_new_session=True,
        )
    made = PickerOfWorkers(process, *ports, log)
    left: list[psutil.Process] = []
    try:
        await until(made.ready, "all workers are ready", 30.0, log.read_text)
        yield made
    finally:
        if process.returncode is None:
            left = made.workers
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
            assert await asyncio.wait_for(process.wait(), 60) == 0, log.read_text()
        await until(lambda: not any(one.is_running() for one in left), "no worker is left")


async def ask(port: int, body: bytes, id: str) -> tuple[grpc.aio.Channel, Any, str]:
    """A request on a connection of its own, whose answer has not begun; where it was sent."""
    channel = grpc.aio.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)])
    call = channel.stream_stream(f"/{SERVICE}/Process")()
    destination = ""
    for message in messages_of(body, id)[:2]:
        await call.write(message)
        answer = pb.ProcessingResponse.FromString(await call.read())
        lb = answer.dynamic_metadata.fields.get("envoy.lb")
        if lb is not None:
            destination = next(iter(lb.struct_value.fields.values())).string_value
    return channel, call, destination
