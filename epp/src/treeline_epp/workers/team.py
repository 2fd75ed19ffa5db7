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
from treeline_epp.workers.entrance import hand, to_shed
from treeline_epp.workers.link import MOST_LINE, Selectable, Shed, Start, Status, encode, lines
from treeline_epp.xds.eds import Eds

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between the end of a worker and the start of its successor; twice as long each time."""
GOOD_S = 60.0
"""A worker that has lived this long was well: its successor starts soon."""
SILENT_S = 3.0
"""A worker that has said nothing for so long is given no connection and asked for no page …"""
HUNG_S = 20.0
"""… and after so long it is ended …"""
START_S = 60.0
"""… but for its beginning, which may take so much longer."""
EVEN_S = 3.0
"""How often connections are shared out anew."""
_LOOK_S = 0.05
_MISSED_S = 1.0
"""Where we ourselves come so much too late to look, whoever stopped us may have stopped them."""
_KILL_S = 5.0
"""Workers may take so long beyond the drain."""


GONE = Status()
"""Of a member without a process."""


class WorkerFailed(Exception):
    """A worker ended before it was ready for the first time: the command line or the machine is at fault."""


@dataclass(frozen=True, slots=True)
class Place:
    """A member as it is now: `pid` is 0 where no process has its place, `silent_s` how long it has said nothing, where
    that is too long."""

    index: int
    pid: int
    status: Status
    silent_s: float


@dataclass(eq=False, slots=True)
class Member:
    """One place in the team, whichever process has it. `peer_socket` is its own for other workers' datagrams."""

    index: int
    peer_socket: socket.socket
    status: Status = field(default_factory=Status)
    heard_at: float = 0.0
    writer: asyncio.StreamWriter | None = None
    entrance: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    told: frozenset[str] | None = None
    given: int = 0
    silent: bool = False
    was_ready: bool = False

    @property
    def ready(self) -> bool:
        """It takes connections, as far as is known."""
        return self.status.ready and not self.silent

    @property
    def connections(self) -> int:
        """Those that it has or is about to get."""
        return self.status.connections + self.given - self.status.taken

    def place(self, now: float) -> Place:
        """For whoever asks it for a page."""
        running = self.process is not None and self.process.poll() is None
        pid = self.process.pid if running and self.process is not None else 0
        return Place(self.index, pid, self.status, now - self.heard_at if self.silent else 0.0)


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
        yield "gauge", "workers", "Worker processes that take requests.", {}, sum(m.ready for m in self.members)
        yield "counter", "worker_restarts", "Workers that were started again.", {}, self.restarts
        yield from eds_samples(self._eds.state)

    def places(self) -> list[Place]:
        """All of them, as they are now."""
        now = time.monotonic()
        return [member.place(now) for member in self.members]

    def give(self, connection: socket.socket) -> bool:
        """Hand it to the worker that has the fewest; False where none can take it. The caller closes it here."""
        ready = [member for member in self.members if member.ready]
        for member in sorted(ready, key=lambda member: (member.connections, member.given)):
            if member.entrance is not None and hand(member.entrance, connection):
                member.given += 1
                return True
        return False

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
        with contextlib.ExitStack() as stack:
            (ours, its), (entrance, exit) = pairs = socket.socketpair(), socket.socketpair()
            for one in (*pairs[0], *pairs[1]):
                stack.callback(one.close)
            start = Start(member.index, self._key, member.peer_socket.fileno(), exit.fileno(), self._peers)
            process = member.process = self._started(its.fileno(), start)
            its.close()
            exit.close()
            return await self._follow(member, process, ours, entrance, start)

    async def _follow(
        self,
        member: Member,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        entrance: socket.socket,
        start: Start,
    ) -> int:
        entrance.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=link, limit=MOST_LINE)
        member.writer, member.told, member.heard_at = writer, None, time.monotonic() + START_S
        member.entrance, member.given, member.silent = entrance, 0, False
        writer.write(encode(start))
        try:
            async for line in lines(reader):
                if isinstance(line, Status):
                    await self._on_status(member, line)
            writer.close()
            # Its end of the link is closed: it has ended, or makes no sense and is told so by the same.
            return await _end(process)
        finally:
            # Also when we are cancelled: `stop` sees to the process then.
            member.writer = member.entrance = None
            writer.close()
            await self._on_status(member, GONE)

    def _started(self, link: int, start: Start) -> subprocess.Popen[bytes]:
        # Not by the loop, which forks: gRPC would look after that, and say so on stderr.
        return subprocess.Popen(
            [sys.executable, "-m", "treeline_epp.worker_process", str(link), *self._argv],
            stdin=subprocess.DEVNULL,
            pass_fds=(link, start.peer_fd, start.entrance_fd),
            start_new_session=True,  # a Ctrl-C is for the parent, which ends them in order
        )

    async def _on_status(self, member: Member, status: Status) -> None:
        if member.silent:
            member.silent = False
            if status is not GONE:
                silent_s = time.monotonic() - member.heard_at
                log.warning(
                    "worker %d is back after %.1f s; what its connections brought has waited", member.index, silent_s
                )
        member.heard_at = time.monotonic()
        member.was_ready = member.was_ready or status.ready
        changed = (status.endpoints, status.synced) != (member.status.endpoints, member.status.synced)
        member.status = status
        if changed:
            self._announce()
        if changed or member.told is None:
            self._tell_selectable()
        await self._tell_ready()

    async def _tell_ready(self) -> None:
        # All of them at the start; later those that are there serve for one that is not.
        ready = any(m.ready for m in self.members) and all(m.was_ready for m in self.members)
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
        looked_at = evened_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if now > looked_at + _MISSED_S:  # a machine that stood still, or we did: nobody could be heard
                for member in self.members:
                    member.heard_at += now - looked_at
            looked_at = now
            if any(len(m.told or ()) < len(m.status.endpoints) for m in self.members):
                self._tell_selectable()  # some are selectable by time
            for member in self.members:
                if member.process is not None and member.process.poll() is None:
                    self._listen_for(member, member.process, now - member.heard_at)
            await self._tell_ready()
            if now >= evened_at + EVEN_S:
                evened_at = now
                self._even_out()

    def _listen_for(self, member: Member, process: subprocess.Popen[bytes], silent_s: float) -> None:
        if silent_s > SILENT_S and not member.silent:
            member.silent = True
            text = (
                "worker %d says nothing for %.1f s: it gets no connections, and those it has wait; at %g s it is killed"
            )
            log.warning(text, member.index, silent_s, HUNG_S)
        if silent_s > HUNG_S:
            log.error("worker %d says nothing for %g s; it is killed", member.index, HUNG_S)
            member.heard_at = time.monotonic()
            process.send_signal(signal.SIGKILL)

    def _even_out(self) -> None:
        """Let those with too many connections give some up: a worker that was started anew has none."""
        ready = [member for member in self.members if member.ready]
        for member, count in zip(ready, to_shed([member.connections for member in ready]), strict=True):
            if count and member.writer is not None:
                log.info("worker %d gives up %d connections, others have fewer", member.index, count)
                member.writer.write(encode(Shed(count)))


async def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for it; its exit status."""
    while True:
        code = process.poll()
        if code is not None:
            return code
        await asyncio.sleep(_LOOK_S)


def _words(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
