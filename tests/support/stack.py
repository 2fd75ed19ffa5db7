"""The whole path as real processes that the test controls: each is started, killed and restarted by name.

`treeline up` stops everything when a child dies; here the dead stay dead until the test says otherwise. The processes
and their arguments are those of `treeline up` (`treeline.up.plan`), only the ports are free ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from treeline.up.plan import ChildSpec, UpOptions, gateway_url, plan
from treeline.up.run import envoy_config
from treeline_operator.envoy import bootstrap_json
from treeline_operator.envoy.binary import envoy_binary
from treeline_wire.tiny_model import tiny_model

from support.ports import free_base, free_ports

READY_TIMEOUT_S = 240.0


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = 60.0, state: Callable[[], Any] | None = None
) -> Any:
    """Poll until `condition` is true and return its value; on expiry fail with `what` and the state of the world."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout_s} s: {what}; the world: {state() if state else 'not described'}"
            )
        time.sleep(0.02)


@dataclass
class Process:
    """One child: its command, and its process while it runs."""

    spec: ChildSpec
    log_path: Path
    popen: subprocess.Popen[bytes] | None = None


class Stack:
    """Owns its processes: `replicas` runtimes named runtime-0 …, `picker`, `envoy`."""

    def __init__(self, folder: Path, replicas: int = 2, **options: Any) -> None:
        several = ("runtime_port", "runtime_metrics_port", "runtime_admin_port")
        several += ("events_port", "replay_port", "load_port")
        single = (
            "port",
            "ext_proc_port",
            "eds_port",
            "metrics_port",
            "picker_admin_port",
        )
        ports = {name: free_base(replicas) for name in several} | dict(
            zip(single, free_ports(len(single)), strict=True)
        )
        settings = {"model": str(tiny_model()), "served_model_name": "tiny", "debug_endpoints": True} | ports | options
        self.options = UpOptions(replicas=replicas, **settings)
        folder.mkdir(parents=True, exist_ok=True)
        bootstrap = folder / "envoy.json"
        bootstrap.write_text(bootstrap_json(envoy_config(self.options)))
        specs = plan(self.options, envoy_binary(), bootstrap)
        self.processes = {spec.name: Process(spec, folder / f"{spec.name}.log") for spec in specs}
        self.url = gateway_url(self.options)
        self.http = httpx.Client(timeout=30, trust_env=False)

    @property
    def runtimes(self) -> list[str]:
        return [name for name in self.processes if name.startswith("runtime-")]

    def address(self, name: str) -> str:
        """Return ip:port of a runtime's HTTP server, as `x-treeline-endpoint` names it."""
        host, port = self.processes[name].spec.ports["port"]
        return f"{host}:{port}"

    def name_of(self, address: str) -> str:
        return next(name for name in self.runtimes if self.address(name) == address)

    # Life and death

    def start(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start processes (all by default) and wait until each is ready."""
        names = names or tuple(self.processes)
        for name in names:
            process = self.processes[name]
            assert process.popen is None, f"{name} runs already"
            with process.log_path.open("ab") as log:
                process.popen = subprocess.Popen(
                    process.spec.argv,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **process.spec.env, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                )
        for name in names:
            self.wait_ready(name, timeout_s)

    def wait_ready(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        process = self.processes[name]

        def answers() -> bool:
            assert process.popen is not None
            status = process.popen.poll()
            assert status is None, f"{name} exited with {status}:\n{self.log(name)}"
            return self._ok(process.spec.ready_url, process.spec.ready_headers)

        until(answers, f"{name} ready", timeout_s, lambda: self.log(name))

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Send a signal (SIGKILL goes to the whole group) and wait for the end; return the exit status."""
        process = self.processes[name]
        assert process.popen is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            if number is signal.SIGKILL:
                os.killpg(process.popen.pid, number)
            else:
                process.popen.send_signal(number)
        status = process.popen.wait(timeout_s)
        process.popen = None
        return status

    def send(self, name: str, number: signal.Signals) -> None:
        popen = self.processes[name].popen
        assert popen is not None
        popen.send_signal(number)

    def close(self) -> None:
        self.http.close()
        for name, process in self.processes.items():
            if process.popen is not None:
                members = (
                    psutil.Process(process.popen.pid).children(recursive=True) if process.popen.poll() is None else []
                )
                self.end(name, signal.SIGKILL)
                for member in members:
                    member.wait(60) if member.is_running() else None

    # Looking

    def _ok(self, url: str, headers: Mapping[str, str]) -> bool:
        try:
            return self.http.get(url, headers=dict(headers)).status_code == 200
        except httpx.HTTPError:
            return False

    def log(self, name: str, lines: int = 40) -> str:
        path = self.processes[name].log_path
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def metrics(self) -> dict[str, float]:
        """Return the picker's metrics by their full name with labels."""
        text = self.http.get(f"http://127.0.0.1:{self.options.metrics_port}/metrics").text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def radix(self, name: str) -> dict[str, Any]:
        """Return what a runtime says its cache holds."""
        host, port = self.processes[name].spec.ports["admin-port"]
        return dict(self.http.get(f"http://{host}:{port}/debug/radix").json())

    def announced(self, name: str) -> set[int]:
        return {int(block["hash"]) for block in self.radix(name)["blocks"] if block["announced"]}

    def described(self, name: str) -> dict[str, Any]:
        """Return the picker's description of an endpoint."""
        page = self.http.get(f"http://127.0.0.1:{self.options.picker_admin_port}/debug/endpoints").json()
        return next(dict(endpoint) for endpoint in page["endpoints"] if endpoint["name"] == name)

    def child(self, name: str, word: str) -> psutil.Process:
        """Return a child of a process, by a word of its command line."""
        popen = self.processes[name].popen
        assert popen is not None
        children = psutil.Process(popen.pid).children(recursive=True)
        return next(child for child in children if any(word in part for part in child.cmdline()))

    def tree(self, name: str) -> set[int]:
        """Return the blocks that the picker believes a runtime holds: none of one that it has not heard yet."""
        answer = self.http.get(f"http://127.0.0.1:{self.options.picker_admin_port}/debug/tree", params={"pod": name})
        return {int(block) for block in answer.json().get("blocks", ())}

    def agree(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until the picker's tree equals the runtime's cache."""
        until(
            lambda: self.announced(name) == self.tree(name),
            f"the tree equals {name}'s cache",
            timeout_s,
            lambda: {
                "only in the cache": len(self.announced(name) - self.tree(name)),
                "only in the tree": len(self.tree(name) - self.announced(name)),
            },
        )


@contextmanager
def running_stack(folder: Path, **options: Any) -> Iterator[Stack]:
    """Run a stack until the end of the block."""
    stack = Stack(folder, **options)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()
