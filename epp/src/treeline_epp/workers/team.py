"""The parent of several workers: starts them, starts anew those that die or hang, and speaks for all of them.

Workers are processes of their own command line (`worker_process.py`), each with its own tree, fed by the same events: a
tree costs memory once for each worker, but nothing has to be locked or copied between them, and one that dies takes
nothing with it. What they have in flight they tell each other as pickers of several machines do (`treeline_epp.peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from treeline_epp.fleet_report import eds_samples
from treeline_epp.metrics import Sample
from treeline_epp.peers.gossip import Address
from treeline_epp.workers.link import MOST_LINE, Selectable, Start, Status, encode, lines
from treeline_epp.xds.eds import Eds

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between the end of a worker and the start of its successor; twice as long each time."""
GOOD_S = 60.0
"""A worker that has lived this long was well: its successor starts soon."""
HUNG_S = 20.0
"""A worker that has said nothing for so long is ended …"""
START_S = 60.0
"""… but for its beginning, which may take so much longer."""
_LOOK_S = 0.05
_KILL_S = 5.0
"""Workers may take so long beyond the drain."""


class WorkerFailed(Exception):
    """A worker ended before it was ready for the first time: the command line or the machine is at fault."""


@dataclass(eq=False, slots=True)
class Member:
    """One place in the team, whichever process has it. `socket` is its own for other workers' datagrams."""

    index: int
    socket: socket.socket
    status: Status = field(default_factory=Status)
    heard_at: float = 0.0
    writer: asyncio.StreamWriter | None = None
    process: subprocess.Popen[bytes] | None = None
    told: frozenset[str] | None = None
    was_ready: bool = False


class Team:
    """See the module. `argv` is the picker's own command line; `key` and `peers` as `link.Start` has them. `on_ready`
    is told whether requests are taken."""

    def __init__(
        self,
        argv: Sequence[str],
        eds: Eds,
        sockets: Sequence[socket.socket],
        key: bytes,
        peers: Sequence[Address],
        on_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.members = [Member(index, one) for index, one in enumerate(sockets)]
        self.restarts = 0
        self._argv = argv
        self._eds = eds
        self._key = key
        self._peers = tuple(peers)
        self._on_ready = on_ready
        self._ready = False
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[object]] = []
        eds.on_ack = self._tell_selectable

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set; `stop` comes next, whatever this raises. Raises WorkerFailed."""
        jobs = [self._keep(member) for member in self.members]
        self._tasks = [asyncio.create_task(job) for job in (*jobs, self._look(), stopping.wait())]
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # but for `stopping`, none of them ends without a reason

    async def stop(self, drain_s: float) -> None:
        """Let all finish what is open, and end them; nothing is left behind."""
        self._stopping.set()
        if self._tasks:
            log.info("stopping")
        running = [member.process for member in self.members if member.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s + _KILL_S):
                await asyncio.gather(*map(_end, running))
        for process in running:
            if process.poll() is None:
                log.error("a worker (pid %d) does not end; it is killed", process.pid)
                process.send_signal(signal.SIGKILL)
                await _end(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def samples(self) -> Iterator[Sample]:
        """For the metrics page."""
        yield "gauge", "workers", "Worker processes that take requests.", {}, sum(m.status.ready for m in self.members)
        yield "counter", "worker_restarts", "Workers that were started again.", {}, self.restarts
        yield from eds_samples(self._eds.state)

    # One worker

    async def _keep(self, member: Member) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                words = _words(await self._live(member))
            except OSError as error:
                words = f"cannot be started ({error})"
            if self._stopping.is_set():
                break
            if not member.was_ready:
                raise WorkerFailed(f"worker {member.index} {words} before it was ready; the log says why")
            if time.monotonic() - began >= GOOD_S:
                pause = FIRST_PAUSE_S
            log.error("worker %d %s; another starts in %g s", member.index, words, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self.restarts += 1

    async def _live(self, member: Member) -> int:
        """One process from its beginning to its end; returns its exit status."""
        ours, its = socket.socketpair()
        fd = member.socket.fileno()
        try:
            process = member.process = self._started(its.fileno(), fd)
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_LINE)
        member.writer, member.told, member.heard_at = writer, None, time.monotonic() + START_S
        writer.write(encode(Start(member.index, self._key, fd, self._peers)))
        try:
            async for line in lines(reader):
                if isinstance(line, Status):
                    await self._on_status(member, line)
            writer.close()
            # Its end of the link is closed: it has ended, or makes no sense and is told so by the same.
            return await _end(process)
        finally:
            # Also when we are cancelled: `stop` sees to the process then.
            member.writer = None
            writer.close()
            await self._on_status(member, Status())

    def _started(self, link: int, peer: int) -> subprocess.Popen[bytes]:
        # Not by the loop, which forks: gRPC would look after that, and say so on stderr.
        return subprocess.Popen(
            [sys.executable, "-m", "treeline_epp.worker_process", str(link), *self._argv],
            stdin=subprocess.DEVNULL,
            pass_fds=(link, peer),
            start_new_session=True,  # a Ctrl-C is for the parent, which ends them in order
        )

    async def _on_status(self, member: Member, status: Status) -> None:
        member.heard_at = time.monotonic()
        member.was_ready = member.was_ready or status.ready
        changed = (status.endpoints, status.synced) != (member.status.endpoints, member.status.synced)
        member.status = status
        if changed:
            self._announce()
        if changed or member.told is None:
            self._tell_selectable()
        # All of them at the start; later those that are there serve for one that is not.
        ready = any(m.status.ready for m in self.members) and all(m.was_ready for m in self.members)
        if ready != self._ready and not self._stopping.is_set():
            self._ready = ready
            await self._on_ready(ready)

    # What Envoy is told

    def _announce(self) -> None:
        """What any of them knows; draining is what any of them says so of. The list of nobody is no list."""
        known = [member.status for member in self.members if member.status.synced]
        if not known:
            return
        endpoints: dict[str, bool] = {}
        for status in known:
            for address, draining in status.endpoints.items():
                endpoints[address] = endpoints.get(address, False) or draining
        self._eds.announce(endpoints)
        if not self._eds.state.synced:
            self._eds.set_synced()

    def _tell_selectable(self) -> None:
        for member in self.members:
            if member.writer is None:
                continue
            selectable = frozenset(filter(self._eds.selectable, member.status.endpoints))
            if selectable != member.told:
                member.told = selectable
                member.writer.write(encode(Selectable(selectable)))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if any(len(m.told or ()) < len(m.status.endpoints) for m in self.members):
                self._tell_selectable()  # some are selectable by time
            for member in self.members:
                process = member.process
                silent = time.monotonic() > member.heard_at + HUNG_S
                if silent and process is not None and process.poll() is None:
                    log.error("worker %d says nothing for %g s; it is killed", member.index, HUNG_S)
                    member.heard_at = time.monotonic()
                    process.send_signal(signal.SIGKILL)


async def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for it; its exit status."""
    while True:
        code = process.poll()
        if code is not None:
            return code
        await asyncio.sleep(_LOOK_S)


def _words(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
