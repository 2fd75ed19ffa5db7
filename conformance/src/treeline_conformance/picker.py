"""The picker under test: its addresses, and its process if the suite has started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from treeline_conformance.proxy import open_channel

_CHECK: Final = "/grpc.health.v1.Health/Check"
_WATCH: Final = "/grpc.health.v1.Health/Watch"
_END_S: Final = 20.0
_PLACE: Final = re.compile(r"\{([a-z_0-9]+)\}")


class PickerError(RuntimeError):
    """The picker cannot be tested; the message says why."""


@dataclass(frozen=True)
class Target:
    """A picker to test. `command` starts it, if the suite should; `address` is HOST:PORT otherwise. Ports are 0 where
    they are unknown.
    """

    name: str
    address: str = ""
    command: str = ""
    health_port: int = 0
    metrics_port: int = 0


def filled_in(command: str, values: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """Return the command's words with the names in braces replaced, and the names that were used. Raises
    PickerError.
    """
    used: set[str] = set()

    def value(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in values:
            known = ", ".join(f"{{{one}}}" for one in values)
            raise PickerError(f"--start knows no {{{name}}}; there are {known}")
        used.add(name)
        return values[name]

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise PickerError(f"--start cannot be read: {error}: {command}") from None
    if not words:
        raise PickerError("--start needs a command")
    return [_PLACE.sub(value, word) for word in words], used


class Picker:
    """A picker under test. `health` asks the gRPC health service; `started` says whether the process is the suite's."""

    def __init__(self, target: Target, address: str, health: str, metrics: str) -> None:
        self.target = target
        self.address = address
        self.health_address = health
        self.metrics_address = metrics
        self.log: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def status(self) -> int | None:
        """The exit status of the suite's process, once it has ended."""
        return None if self._process is None else self._process.returncode

    async def start(self, words: list[str], kubeconfig: Path, log: Path) -> None:
        """Start the process. Raises PickerError."""
        self.log = log
        try:
            with log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"KUBECONFIG": str(kubeconfig)},
                    start_new_session=True,
                )
        except OSError as error:
            raise PickerError(f"{words[0]} cannot be started: {error}") from None

    async def listening(self, seconds: float) -> bool:
        """Return whether its port takes connections in time; False if the process has ended."""
        host, _, port = self.address.rpartition(":")
        deadline = asyncio.get_running_loop().time() + seconds
        while self.status is None and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return True
            await asyncio.sleep(0.05)
        return False

    def terminate(self) -> None:
        """Send SIGTERM, as Kubernetes ends a pod."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def ended(self, seconds: float) -> bool:
        """Return whether it ends in time."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return self._process.returncode is not None

    async def stop(self) -> None:
        """End it, by force if needed; its children too, which are in its process group."""
        if self._process is None:
            return
        self.terminate()
        await self.ended(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def last_words(self) -> str:
        """Return the end of its output."""
        if self.log is None or not self.log.exists():
            return ""
        return self.log.read_bytes()[-2000:].decode(errors="replace")

    async def health(self, name: str, patience_s: float = 2.0, at: str = "") -> str:
        """Return the health of a name by the health service, or by the one `at` another address: its status, a gRPC
        status, or UNREACHABLE.
        """
        async with open_channel(at or self.health_address) as channel:
            check = channel.unary_unary(
                _CHECK,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                answer = await check(health_pb2.HealthCheckRequest(service=name), timeout=patience_s)
            except grpc.aio.AioRpcError as error:
                unreachable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                return "UNREACHABLE" if error.code() in unreachable else str(error.code().name)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def watched_health(self, name: str, patience_s: float = 2.0) -> str:
        """Return the first answer of `Watch`."""
        async with open_channel(self.health_address) as channel:
            watch = channel.unary_stream(
                _WATCH,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            call = watch(health_pb2.HealthCheckRequest(service=name), timeout=patience_s)
            try:
                answer: Any = await call.read()
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            finally:
                call.cancel()
            if answer is grpc.aio.EOF:
                return str((await call.code()).name)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
