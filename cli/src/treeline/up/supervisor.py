"""Starts children, watches them, and leaves none behind.

A child is started when those it waits for are ready. A signal or the death of any child ends the run: then all are
asked to stop (SIGTERM), and what remains at the deadline is killed with its whole process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from treeline.printable import printable
from treeline.up import picker_page

if TYPE_CHECKING:
    from treeline_epp.endpoints.spec import EndpointSpec

    from treeline.up.plan import ChildSpec

READY_POLL_S = 0.1
READY_TIMEOUT_S = 600.0
LASTING_S = 5.0
"""The picker asks an engine several times in this time: one that keeps giving an answer of no use is given up."""
STOP_TIMEOUT_S = 8.0  # with the kill after it, well inside the ten seconds that are promised


class Phase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    EXITED = "exited"


class ChildFailed(RuntimeError):
    """A child died or never became ready. The message names it and ends with the last lines of its log."""


@dataclass
class Child:
    """One process: its spec, where its output goes, and how far it is."""

    spec: ChildSpec
    log_path: Path
    phase: Phase = Phase.WAITING
    since: float = field(default_factory=time.monotonic)
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""
    """Why the picker does not use it yet: of an engine."""

    def enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, time.monotonic()

    def become_ready(self) -> None:
        self.enter(Phase.READY)
        self.ready.set()

    def last_lines(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()[-15:]
            return "\n".join(f"  | {line}" for line in lines)
        return ""


def die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent dies; even a killed `treeline up` leaves nothing (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class Supervisor:
    """Owns the children from start to end. Use `run`; it returns when everything has stopped."""

    def __init__(self, specs: Sequence[ChildSpec], log_dir: Path) -> None:
        self.children = [Child(spec, log_dir / f"{spec.name}.log") for spec in specs]
        self._by_name = {child.spec.name: child for child in self.children}
        self._stop = asyncio.Event()
        self._status = 0

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Start all, call `on_ready` once all are ready, wait for a signal; then stop all.

        Returns the exit status: 0 for a signal that came after all were ready, else 128 + signal. Raises ChildFailed
        when a child dies first.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        try:
            await self._until_stopped(on_ready)
            return self._status
        finally:
            await self._stop_all()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _asked_to_stop(self, number: signal.Signals) -> None:
        if not self._stop.is_set() and not all(child.ready.is_set() for child in self.children):
            self._status = 128 + number
        self._stop.set()

    async def _until_stopped(self, on_ready: Callable[[], None]) -> None:
        stopped = asyncio.create_task(self._stop.wait())
        lives = [asyncio.create_task(self._live(child)) for child in self.children]
        all_ready = asyncio.create_task(self._all_ready())
        pending: set[asyncio.Task[Any]] = {stopped, all_ready, *lives}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if stopped in done:
                    return
                for life in lives:
                    if life in done:
                        life.result()  # raises ChildFailed
                if all_ready in done:
                    on_ready()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _all_ready(self) -> None:
        for child in self.children:
            await child.ready.wait()

    async def _live(self, child: Child) -> None:
        """Start `child` when its turn comes and watch it. Ends only by raising ChildFailed, or by being cancelled."""
        for name in child.spec.after:
            await self._by_name[name].ready.wait()
        child.enter(Phase.STARTING)
        if child.spec.engine is not None:
            await self._is_accepted(child, child.spec.engine)
            await asyncio.Event().wait()  # from now on the picker watches it
        with child.log_path.open("wb") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **child.spec.env},
                start_new_session=True,  # a Ctrl-C reaches us alone, and we stop the children in order
                preexec_fn=die_with_parent,
            )
        becoming_ready = asyncio.create_task(self._becomes_ready(child))
        try:
            status = await child.process.wait()
        finally:
            becoming_ready.cancel()
        before = "" if child.ready.is_set() else " before it was ready"
        child.enter(Phase.EXITED)
        raise ChildFailed(f"{child.spec.name} {_ending(status)}{before}; its last lines:\n{child.last_lines()}")

    async def _becomes_ready(self, child: Child) -> None:
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while True:
                headers = dict(child.spec.ready_headers)
                with contextlib.suppress(httpx.HTTPError):
                    # Its body stays unread: behind the gateway it is an engine's, and may have no end.
                    async with client.stream("GET", child.spec.ready_url, headers=headers) as answer:
                        if answer.status_code == 200:
                            child.become_ready()
                            return
                if time.monotonic() - child.since > READY_TIMEOUT_S:
                    if child.process is not None:
                        self._signal(child, signal.SIGKILL)
                    return
                await asyncio.sleep(READY_POLL_S)

    async def _is_accepted(self, child: Child, engine: EndpointSpec) -> None:
        """Wait until the picker sends requests to an engine. Raises ChildFailed where waiting is in vain."""
        useless_since: float | None = None
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while True:
                found = None
                with contextlib.suppress(httpx.HTTPError, *picker_page.UNREADABLE):
                    found = picker_page.read((await client.get(child.spec.ready_url)).content).endpoint(engine.name)
                now = time.monotonic()
                if found is not None:
                    if found.ready:
                        child.become_ready()
                        return
                    child.problem = printable(found.problem or "")
                    useless_since = (useless_since or now) if found.lasting else None
                if useless_since is not None and now - useless_since > LASTING_S:
                    raise ChildFailed(
                        f"no request can go to {child.spec.name}: {child.problem}. Give the address of a server with "
                        f"OpenAI's API by --engine {printable(engine.name)}=HOST:PORT, or leave it out"
                    )
                if now - child.since > READY_TIMEOUT_S:
                    raise ChildFailed(
                        f"{child.spec.name} is not ready after {READY_TIMEOUT_S:.0f} s: {child.problem}. Start that "
                        f"server, or leave out its --engine"
                    )
                await asyncio.sleep(READY_POLL_S)

    def _running(self) -> Iterator[Child]:
        return (child for child in self.children if child.process is not None and child.process.returncode is None)

    def _signal(self, child: Child, number: signal.Signals) -> None:
        """A kill goes to the child's whole group; a request to stop goes to the child, which stops its own."""
        assert child.process is not None
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(child.process.pid, number)
            else:
                child.process.send_signal(number)

    async def _stop_all(self) -> None:
        running = list(self._running())
        for child in running:
            self._signal(child, signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in running if child.process]
        if waits:
            await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
        # Groups of children that died by themselves may still hold grandchildren.
        for child in self.children:
            if child.process is not None:
                self._signal(child, signal.SIGKILL)
                child.enter(Phase.EXITED)
        await asyncio.gather(*waits)


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"
