"""Runs the programs of tests/http2_clients against `treeline pick`: clients by grpc-go and by tonic.

make http2-clients ARGS="--only picks,goaway"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treeline_bench.context import ROOT
from treeline_bench.processes import Child
from treeline_epp.extproc.tls import self_signed

from support.epp_io import engines
from support.ports import free_ports

BUILD: Final = ROOT / "scripts" / "http2_clients.sh"
CLIENTS: Final = ("go", "rust")
_DRAIN_S: Final = 60.0
_START_S: Final = 240.0


class Missing(Exception):
    """A program is not built; the message says how to build it."""


def program(name: str) -> Path:
    """Return the path of a program of tests/http2_clients. Raises Missing."""
    done = subprocess.run([str(BUILD), "--check", name], capture_output=True, text=True)
    if done.returncode:
        raise Missing(done.stderr.strip())
    return Path(done.stdout.strip())


def built(name: str) -> Path:
    """Return the path of a program, and build it if necessary. Ends the process if the build fails."""
    done = subprocess.run([str(BUILD), name], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return Path(done.stdout.strip())


class PickerProcess:
    """`treeline pick` without Kubernetes, which can be stopped and started again on the same ports."""

    def __init__(self, name: str, folder: Path, endpoints: Sequence[str], *flags: str) -> None:
        ports = free_ports(4)
        self.port, self._admin = ports[0], ports[3]
        names = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port")
        self._name, self._folder = name, folder
        self._words = [str(Path(sys.executable).parent / "treeline"), "pick", "--drain-timeout", str(_DRAIN_S), *flags]
        for flag, port in zip(names, ports, strict=True):
            self._words += [flag, str(port)]
        for at, address in enumerate(endpoints):
            self._words += ["--endpoint", f"e{at}={address}"]
        self._child: Child | None = None

    @property
    def target(self) -> str:
        """Return host:port of its ext_proc."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the picker. Raises ChildFailed."""
        self._child = Child(self._name, self._words, self._folder)
        await asyncio.to_thread(self._child.wait_ready, f"http://127.0.0.1:{self._admin}/ready", _START_S)

    async def restart(self) -> None:
        """Stop it by SIGTERM, check its exit status, and start it again."""
        child = self._child
        assert child is not None
        child.process.terminate()
        status = await asyncio.to_thread(child.process.wait, _DRAIN_S)
        assert status == 0, f"the picker ended with status {status}:\n{child.last_lines()}"
        await self.start()

    def stop(self) -> None:
        """End the picker, whatever its state."""
        if self._child is not None:
            self._child.stop()


@dataclass(frozen=True)
class Pickers:
    """A picker without TLS, and the flags that lead a client to it and to another one with TLS."""

    plain: PickerProcess
    flags: list[str]


@contextlib.asynccontextmanager
async def pickers(folder: Path) -> AsyncIterator[Pickers]:
    """Run two ready pickers with three idle engines. The folder gets certificate and logs."""
    key, chain = self_signed()
    (folder / "tls.key").write_bytes(key)
    (folder / "tls.crt").write_bytes(chain)
    async with engines(3) as fakes:
        endpoints = [fake.address for fake in fakes]
        plain = PickerProcess("picker", folder, endpoints, "--secure-serving=false")
        secure = PickerProcess("picker-tls", folder, endpoints, "--secure-serving", "--cert-path", str(folder))
        try:
            await asyncio.gather(plain.start(), secure.start())
            flags = ["--target", plain.target, "--tls-target", secure.target, "--ca", str(folder / "tls.crt")]
            yield Pickers(plain, [*flags, "--endpoints", ",".join(endpoints)])
        finally:
            plain.stop()
            secure.stop()


async def tried(client: Path, asked: Pickers, flags: Sequence[str], tell: Callable[[str], object]) -> int:
    """Run a client and return its exit status; `tell` gets a line for each check. The client says when to restart the
    picker."""
    words = [str(client), *asked.flags, *flags]
    running = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert running.stdout is not None
    restarts: list[asyncio.Task[None]] = []
    try:
        async for line in running.stdout:
            said = line.decode().strip()
            if said == "stop":
                restarts.append(asyncio.create_task(asked.plain.restart()))
            else:
                tell(said)
        status = await running.wait()
        await asyncio.gather(*restarts)
    finally:
        for restart in restarts:
            restart.cancel()
        if running.returncode is None:
            running.kill()
            await running.wait()
    return status


async def _all(clients: Mapping[str, Path], flags: Sequence[str]) -> int:
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        async with pickers(Path(folder)) as asked:
            for name, client in clients.items():
                found |= await tried(client, asked, flags, _line(name))
    return found


def _line(name: str) -> Callable[[str], object]:
    def tell(said: str) -> None:
        sys.stdout.write(f"{name}: {said}\n")
        sys.stdout.flush()

    return tell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--client", choices=CLIENTS, help="that one alone")
    parser.add_argument("--only", default="", help="checks: picks,body,cancel,tls,keepalive,goaway")
    options = parser.parse_args()
    clients = {name: built(name) for name in ([options.client] if options.client else CLIENTS)}
    return asyncio.run(_all(clients, ["--only", options.only]))


if __name__ == "__main__":
    sys.exit(main())
