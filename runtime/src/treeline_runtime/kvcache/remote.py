"""Pages that another runtime has: asks it, and reads them as if from a slow disk. Used in threads that may wait.

Without keys only addresses of this machine are asked. With keys a peer must prove that it has the pool's pair; nothing
is said before. A peer that was silent is not asked again for a while.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Sequence
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
    Pages,
    PagesError,
    Request,
    encode_request,
    parse_answer,
)
from treeline_wire.security import CurveKeys, is_loopback

from treeline_runtime.kvcache.page import CHUNK_BYTES, BadPage, PageFormat

SILENT_S = 1.0
"""The longest wait for an answer."""
AVOID_S = 10.0
"""How long a peer that failed is not asked."""
MOST_AVOIDED = 1024
MOST_MESSAGE_BYTES = 64 << 10
"""Of an answer, beside the bytes of pages."""


class Lost(OSError):
    """A peer had a page, and has it no more: caches evict, so that is no failure."""


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

    def have(self, address: str, form: PageFormat, digests: Sequence[bytes]) -> list[bytes]:
        """Those of these pages that it has, up to one that it has not; none if it does not answer."""
        if not self.may_ask(address):  # it has failed since
            return []
        try:
            with self._line(address, form) as line:
                line.ask(HaveRequest(form.fingerprint, list(digests[:MOST_DIGESTS])))
                answer, _ = line.answer()
        except OSError:
            self.failed(address)
            return []
        return list(digests[: max(0, answer.count)]) if isinstance(answer, Held) else []

    @contextmanager
    def pull(self, address: str, form: PageFormat, digests: Sequence[bytes]) -> Iterator[Pull]:
        """A context manager for reading these pages. Raises OSError; after that, unless it is Lost, or BadPage inside,
        the peer is avoided."""
        try:
            with self._line(address, form) as line:
                yield Pull(line, form, digests)
        except Lost:
            raise
        except (BadPage, OSError):
            self.failed(address)
            raise

    @contextmanager
    def _line(self, address: str, form: PageFormat) -> Iterator[_Line]:
        with closing(self._context.socket(zmq.DEALER)) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 2 * WINDOW)
            sock.setsockopt(zmq.MAXMSGSIZE, max(CHUNK_BYTES, form.nbytes) + MOST_MESSAGE_BYTES)
            sock.setsockopt(zmq.IPV6, address.startswith("["))
            if self._keys is not None:
                self._keys.secure_client(sock)
            try:
                sock.connect(f"tcp://{address}")
            except zmq.ZMQError as error:
                raise OSError(f"{address}: {error}") from None
            yield _Line(sock)


@dataclass(slots=True)
class _Line:
    """A connection to a peer, for one purpose."""

    sock: zmq.Socket[Any]

    def ask(self, request: Request) -> None:
        self.sock.send_multipart(encode_request(request))

    def answer(self) -> tuple[Answer, memoryview]:
        """Raises OSError: it is silent, or says what nobody says."""
        if not self.sock.poll(int(SILENT_S * 1000)):
            raise TimeoutError("a peer is silent")
        frames = [memoryview(frame.buffer) for frame in self.sock.recv_multipart(copy=False)]
        try:
            return parse_answer(frames)
        except PagesError as error:
            raise OSError(str(error)) from None


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
