"""The port that workers share: the parent accepts, and hands each connection to one of them.

The kernel would share them out, too (`SO_REUSEPORT`), but by a hash: of the two connections of an Envoy with two
threads both would go to one worker every second time, and one that hangs would go on getting its part. Connections are
few, and each carries thousands of calls; so one process can choose for all, by what each has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from treeline_epp.extproc.http2_server import Certificate, Http2Server

log = logging.getLogger(__name__)

_AT_ONCE = 64
_PAUSE_S = 1.0
"""After accepting has failed, which is for want of file descriptors: at once it would fail again."""
_BACKLOG = 1024
_MARK = b"c"
"""A descriptor goes with a byte."""
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Entrance:
    """The parent's end. `give` hands a connection over, and says whether anybody took it."""

    def __init__(self, give: Callable[[socket.socket], bool]) -> None:
        self._give = give
        self._socket: socket.socket | None = None
        self._open = False
        self._again: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, tls: Certificate | None = None) -> None:
        """Have the port, and let nobody in yet. Raises OSError, and what `tls` raises: workers will need it."""
        if tls is not None:
            tls.context()
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(address)

    def open(self) -> None:
        """Listen, from now on: who comes when nobody can take a connection is turned away."""
        if self._socket is not None and not self._open:
            self._open = True
            self._socket.listen(_BACKLOG)
            self._look()

    async def stop(self, _grace_s: float | None) -> None:
        """Let nobody in any more; connections that workers have are theirs."""
        if self._socket is None:
            return
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None

    def _look(self) -> None:
        assert self._socket is not None
        self._again = None
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                log.error("no connection can be accepted (%s); it is tried again in %g s", error.strerror, _PAUSE_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._socket)
                self._again = loop.call_later(_PAUSE_S, self._look)
                return
            with connection:
                if not self._give(connection):
                    log.warning("a connection is turned away: no worker can take it")


def hand(entrance: socket.socket, connection: socket.socket) -> bool:
    """Send a connection through one of a pair of sockets; whether there was room. It remains to be closed here."""
    try:
        socket.send_fds(entrance, [_MARK], [connection.fileno()])
    except OSError:
        return False
    return True


class Handed:
    """A worker's end: what comes through `entrance` is served by `server`. Raises what `tls` raises.

    `taken` counts connections, `told` is called after some.
    """

    def __init__(
        self, entrance: socket.socket, server: Http2Server, tls: Certificate | None, told: Callable[[], None]
    ) -> None:
        self.taken = 0
        self.server = server
        self._entrance = entrance
        self._tls = tls
        self._context = None if tls is None else tls.context()
        self._told = told
        self._adopting: set[asyncio.Task[None]] = set()
        entrance.setblocking(False)
        asyncio.get_running_loop().add_reader(entrance, self._take)

    def close(self) -> None:
        """Take no more."""
        asyncio.get_running_loop().remove_reader(self._entrance)
        self._entrance.close()

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                mark, fds, _, _ = socket.recv_fds(self._entrance, len(_MARK), 1, _CLOSE_ON_EXEC)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                mark, fds = b"", []
            if not mark:  # the parent is no more
                asyncio.get_running_loop().remove_reader(self._entrance)
                break
            self.taken += 1
            if not fds:  # the kernel has dropped it, and its client sees it closed
                log.error("a connection is lost: no file descriptor is left; raise the limit (ulimit -n)")
                continue
            task = asyncio.create_task(self._adopt(socket.socket(fileno=fds[0])))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)
        self._told()

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                self._context = self._tls.changed() or self._context
            await self.server.adopt(connection, self._context)
        except OSError as error:  # a client that has gone, or speaks no TLS
            log.debug("a connection does not come about: %s", error)
            connection.close()
        self._told()


def to_shed(loads: Sequence[int]) -> list[int]:
    """How many connections each is to give up so that no two differ by more than one, when those come again."""
    if not loads or max(loads) - min(loads) < 2:
        return [0] * len(loads)
    low, more = divmod(sum(loads), len(loads))
    out = [0] * len(loads)
    for place in sorted(range(len(loads)), key=lambda place: -loads[place]):
        may_have = low + (1 if more > 0 else 0)
        more -= 1
        out[place] = max(0, loads[place] - may_have)
    return out
