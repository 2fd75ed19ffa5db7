"""Bounds on the requests, and on the bytes of bodies, that each client has at the picker at one time.

A client is an API key or, without one, an address. A request with a key counts until its answer has ended. A request
without a key counts until its answer begins, since many users may share an address. The proxy must say who the client
is, and must not let clients say it themselves; our own Envoy does so.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from treeline_wire import headers as names

BODIES: Final = 8
"""Most bodies of the largest size that one client may be sending. The proxy holds them until they are whole, in a
memory that all clients share: with the defaults of our own Envoy, a third of it."""

LOST_S: Final = 60.0
"""Seconds that a request with a key counts after its connection is lost: its answer may go on, unseen."""
_FORGOTTEN: Final = 1024
"""Most lost requests that are dropped at a time: a millisecond."""


class TooMuch(Exception):
    """A client has reached a bound; the message says which."""


class Clients:
    """Counts by client. `requests` is the most that one client may have, `body_bytes` the largest body; a client with
    an API key may be sending `BODIES` times as many bytes.
    """

    def __init__(self, requests: int, body_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._body_bytes = body_bytes
        self._clock = clock
        self._lost: deque[tuple[float, Present]] = deque()
        self._present: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()

    def enter(self, headers: Mapping[str, str], *, has_body: bool = True) -> Present:
        """Count a new request. The caller closes the result when the request goes. Raises TooMuch.

        A body counts with its `content-length`. A body that does not tell its length counts as the largest one, since
        the picker does not see it before it is whole.
        """
        for _ in range(_FORGOTTEN):
            if not self._lost or self._clock() < self._lost[0][0]:
                break
            self._lost.popleft()[1].close()
        client, keyed = client_of(headers), names.CLIENT in headers
        if self._present[client] >= self._requests:
            raise TooMuch(f"This client has {self._requests} requests that are not answered yet")
        size = _announced(headers, self._body_bytes) if keyed and has_body else 0
        if size and self._coming[client] + size > BODIES * self._body_bytes:
            raise TooMuch(f"This client is sending request bodies of {self._coming[client]} bytes")
        self._present[client] += 1
        self._coming[client] += size
        return Present(self, client, keyed, size)

    def lost(self, present: Present) -> None:
        """Count a lost request for `LOST_S` more."""
        self._lost.append((self._clock() + LOST_S, present))

    def left(self, client: str, requests: int, coming: int) -> None:
        """Subtract from a client's counts. Clients without any request are forgotten."""
        for counter, less in ((self._present, requests), (self._coming, coming)):
            counter[client] -= less
            if not counter[client]:
                del counter[client]

    def __len__(self) -> int:
        """Return the number of clients that have a request here."""
        return len(self._present)


class Present:
    """A request at the picker. `keyed`: its client has an API key."""

    __slots__ = ("_client", "_clients", "_coming", "_here", "keyed")

    def __init__(self, clients: Clients, client: str, keyed: bool, coming: int) -> None:
        self._clients = clients
        self._client = client
        self._coming = coming
        self._here = 1
        self.keyed = keyed

    def arrived(self) -> None:
        """Count the body no longer: it is whole. May be called again."""
        self._clients.left(self._client, 0, self._coming)
        self._coming = 0

    def lose(self) -> None:
        """Handle a lost connection, which hides the request's end: with a key it counts for `LOST_S` more."""
        if self.keyed and self._here:
            self._clients.lost(Present(self._clients, self._client, keyed=True, coming=0))
            self._here = 0

    def close(self) -> None:
        """Count the request no longer. May be called again."""
        self._clients.left(self._client, self._here, self._coming)
        self._here = self._coming = 0


def client_of(headers: Mapping[str, str]) -> str:
    """Return the client's name where the proxy knows it by its key, else the address that the proxy saw, which it
    appends to the list in `x-forwarded-for`.
    """
    named = headers.get(names.CLIENT)
    return named if named is not None else headers.get(names.FORWARDED_FOR, "").rpartition(",")[2].strip()


def _announced(headers: Mapping[str, str], most: int) -> int:
    length = headers.get("content-length", "")
    return min(int(length), most) if length.isdecimal() and len(length) < 20 else most
