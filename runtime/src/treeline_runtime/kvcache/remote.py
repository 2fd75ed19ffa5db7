"""Pages that another runtime has: asks it, and reads them as if from a slow disk. Used in threads that may wait.

Without keys only addresses of this machine are asked. With keys a peer must prove that it has the pool's pair; nothing
is said before. A peer that was silent is not asked again for a while.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from treeline_wire.pages import (
    MOST_DIGESTS,
    WINDOW,
    Answer,
    GetRequest,
    HaveRequest,
    Held,
    Later,
    Pages,
    PagesError,
    Request,
    encode_request,
    parse_answer,
)
from treeline_wire.security import CurveKeys, is_loopback

from treeline_runtime.kvcache.page import CHUNK_BYTES, BadPage, PageFormat

SILENT_S = 1.0
"""The longest wait for a sign of life."""
ASK_AGAIN_S = 0.5
"""The shortest time between two questions about pages that do not come."""
PAUSE_S = 0.01
"""After a sign of life: a flood of them takes no processor."""
AVOID_S = 10.0
"""How long a peer that failed is not asked."""
MOST_AVOIDED = 1024
MOST_MESSAGE_BYTES = 64 << 10
"""Of an answer, beside the bytes of pages."""


class Lost(OSError):
    """A page does not come, and that is no failure of the peer: caches evict, and what is late is not wanted."""


class RemotePages:
    """Asks other runtimes. Any thread may call it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None) -> None:
        self._context = context
        self._keys = keys
        self._failed_at: dict[str, float] = {}

    def may_ask(self, address: str) -> bool:
        """Whether "HOST:PORT" is an address that may be asked now. HOST is an IP address, IPv6 in brackets."""
        host, _, port = address.rpartition(":")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        known = self._keys is not None or is_loopback(host)
        return known and port.isdecimal() and time.monotonic() - self._failed_at.get(address, -AVOID_S) >= AVOID_S

    def failed(self, address: str) -> None:
        """Avoids it for a while."""
        if len(self._failed_at) >= MOST_AVOIDED:
            self._failed_at.clear()
        self._failed_at[address] = time.monotonic()

    def have(
        self, address: str, form: PageFormat, digests: Sequence[bytes], *, coming: bool, wanted: Callable[[], bool]
    ) -> list[bytes]:
        """Those of these pages that it has, up to one that it has not; none if it does not answer while that is
        `wanted`. `coming`: waits a moment for the first of them."""
        if not (self.may_ask(address) and wanted()):  # it has failed since, or a thread came late
            return []
        began = time.monotonic()
        try:
            with self._line(address, form, wanted) as line:
                line.ask(HaveRequest(form.fingerprint, list(digests[:MOST_DIGESTS]), coming))
                answer, _ = line.answer()
        except OSError:
            return []
        count = max(0, answer.count) if isinstance(answer, Held) else 0
        if coming and not count:
            time.sleep(max(0.0, began + ASK_AGAIN_S - time.monotonic()))
        return list(digests[:count])

    @contextmanager
    def pull(
        self, address: str, form: PageFormat, digests: Sequence[bytes], wanted: Callable[[], bool]
    ) -> Iterator[Pull]:
        """A context manager for reading these pages while they are `wanted`. Raises OSError."""
        with self._line(address, form, wanted) as line:
            yield Pull(line, form, digests)

    @contextmanager
    def _line(self, address: str, form: PageFormat, wanted: Callable[[], bool]) -> Iterator[_Line]:
        """Raises OSError; after that, unless it is Lost, or BadPage inside, the peer is avoided."""
        with closing(self._context.socket(zmq.DEALER)) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 2 * WINDOW)
            sock.setsockopt(zmq.MAXMSGSIZE, max(CHUNK_BYTES, form.nbytes) + MOST_MESSAGE_BYTES)
            sock.setsockopt(zmq.IPV6, address.startswith("["))
            if self._keys is not None:
                self._keys.secure_client(sock)
            try:
                try:
                    sock.connect(f"tcp://{address}")
                except zmq.ZMQError as error:
                    raise OSError(f"{address}: {error}") from None
                yield _Line(sock, wanted)
            except Lost:
                raise
            except (BadPage, OSError):
                self.failed(address)
                raise


@dataclass(slots=True)
class _Line:
    """A connection to a peer, for one purpose."""

    sock: zmq.Socket[Any]
    wanted: Callable[[], bool]

    def ask(self, request: Request) -> None:
        self.sock.send_multipart(encode_request(request))

    def answer(self) -> tuple[Answer, memoryview]:
        """Raises Lost: it is not wanted any more; OSError: the peer is silent, or says what nobody says."""
        while self.sock.poll(int(SILENT_S * 1000)):
            frames = [memoryview(frame.buffer) for frame in self.sock.recv_multipart(copy=False)]
            try:
                answer, data = parse_answer(frames)
            except PagesError as error:
                raise OSError(str(error)) from None
            if not isinstance(answer, Later):
                return answer, data
            if not self.wanted():
                raise Lost("a peer is too slow")
            time.sleep(PAUSE_S)
        raise TimeoutError("a peer is silent")


@dataclass(slots=True)
class Pull:
    """Reads pages of one peer, in order, some chunks ahead."""

    line: _Line
    form: PageFormat
    digests: Sequence[bytes]
    _asked: dict[int, list[bytes]] = field(init=False, default_factory=dict)
    """Chunks without an answer, by number."""
    _next: int = field(init=False, default=0)
    """The page after those asked for."""
    _came: dict[bytes, tuple[int, memoryview]] = field(init=False, default_factory=dict)

    def has(self, digest: bytes) -> bool:
        """Whether the page has come, and need not be waited for."""
        return digest in self._came

    def read(self, digest: bytes, to: npt.NDArray[np.uint8]) -> int:
        """Reads a page, and returns its checksum. Raises OSError; BadPage: it is not what was stored."""
        while digest not in self._came:
            self._receive()
        checksum, data = self._came.pop(digest)
        np.copyto(to, np.frombuffer(data, dtype=np.uint8))
        if self.form.checksum(digest, to.data) != checksum:
            raise BadPage("a page of a peer is not what was stored")
        return checksum

    def _receive(self) -> None:
        size, step = self.form.nbytes, self.form.chunk_pages
        while len(self._asked) < WINDOW and self._next < len(self.digests):
            chunk = self._asked[self._next] = list(self.digests[self._next : self._next + step])
            self.line.ask(GetRequest(self.form.fingerprint, chunk, self._next))
            self._next += step
        if not self._asked:
            raise Lost("a peer has not all pages any more")
        answer, data = self.line.answer()
        chunk = self._asked.pop(answer.number, []) if isinstance(answer, Pages) else []
        if not isinstance(answer, Pages) or not chunk:
            raise OSError("a peer answers what it was not asked")
        sums = answer.checksums
        if len(sums) > len(chunk) or len(data) != size * len(sums):
            raise OSError("a peer sends more or less than it says")
        for i, (digest, checksum) in enumerate(zip(chunk, sums, strict=False)):
            self._came[digest] = checksum, data[i * size : (i + 1) * size]
        if len(sums) < len(chunk):
            self._next = len(self.digests)  # those after it are of no use
