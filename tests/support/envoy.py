"""A real Envoy for tests: validated, started on free ports, ended again."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from treeline_operator.envoy import EnvoyConfig, Tls, bootstrap, command

from support.http import client

Patch = Callable[[dict[str, Any]], None]

ENVOY = Path(sys.executable).parent / "envoy"


def validate(config: EnvoyConfig, folder: Path) -> str:
    """Let Envoy check a configuration. Return its errors; empty if it accepts."""
    path = folder / "validate.json"
    path.write_text(json.dumps(bootstrap(config)))
    done = subprocess.run(
        [ENVOY, "--mode", "validate", "--config-path", path, "--log-level", "error"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def self_signed(folder: Path) -> Tls:
    """Return a certificate for localhost that lives a day or two; the test is skipped where no tool can make one."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = Tls(str(folder / "chain.pem"), str(folder / "key.pem"))
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    words += ["-keyout", made.key_file, "-out", made.certificate_file]
    subprocess.run(words, check=True, capture_output=True)
    return made


class Envoy:
    """A running Envoy."""

    def __init__(self, config: EnvoyConfig, folder: Path, patch: Patch) -> None:
        self.config = config
        self.bootstrap = copy.deepcopy(bootstrap(config))  # parts of it are constants
        patch(self.bootstrap)
        self.log = folder / "envoy.log"
        self.access_log = folder / "access.log"
        self.url = f"http://127.0.0.1:{config.listen_port}"
        self.admin = f"http://127.0.0.1:{config.admin_port}"

    def access(self) -> list[dict[str, Any]]:
        """Return the access log so far."""
        return [json.loads(line) for line in self.access_log.read_text().splitlines()]

    async def hosts(self) -> dict[str, str]:
        """Return the endpoints of the pods cluster as Envoy knows them: address → EDS health."""
        async with client() as http:
            answer = await http.get(f"{self.admin}/clusters", params={"format": "json"})
        (pods,) = [c for c in answer.json()["cluster_statuses"] if c["name"] == "pods"]
        return {
            f"{a['address']}:{a['port_value']}": host["health_status"].get("eds_health_status", "UNKNOWN")
            for host in pods.get("host_statuses", [])
            for a in [host["address"]["socket_address"]]
        }

    async def stats(self, prefix: str) -> dict[str, int]:
        """Return counters and gauges whose names start with a prefix."""
        async with client() as http:
            answer = await http.get(f"{self.admin}/stats", params={"filter": f"^{prefix}", "format": "json"})
        return {s["name"]: s["value"] for s in answer.json()["stats"] if "value" in s}


@contextlib.contextmanager
def _process(envoy: Envoy, folder: Path, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    path = folder / "envoy.json"
    path.write_text(json.dumps(envoy.bootstrap))
    with envoy.log.open("wb") as log:
        process = subprocess.Popen(
            command(str(ENVOY), str(path), concurrency=threads, drain_s=1, log_flush_ms=50), stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


@contextlib.asynccontextmanager
async def running_envoy(
    config: EnvoyConfig, folder: Path, *, patch: Patch = lambda _: None, timeout_s: float = 60.0, threads: int = 1
) -> AsyncIterator[Envoy]:
    """Start Envoy; it is live (endpoints fetched, picker's health known) when this yields.

    ``patch`` may change the bootstrap in place.
    """
    envoy = Envoy(config, folder, patch)
    with _process(envoy, folder, threads) as process:
        deadline = time.monotonic() + timeout_s
        async with client() as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{envoy.admin}/ready")).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"Envoy did not become ready:\n{envoy.log.read_text()[-3000:]}")
                await asyncio.sleep(0.02)
        yield envoy
