"""Free ports for processes that need a given one.

They come from outside of the range that the system uses for outgoing connections, so that none of those takes a port
between its choice and the moment a server binds it; parallel test workers choose from ranges of their own.
"""

import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def outside(first: int, last: int) -> range:
    """Return the ports to choose from if outgoing connections have `first` to `last`. Benchmarks take 20,000 and
    more."""
    return max(range(10_000, min(first, 20_000)), range(max(last + 1, 10_000), 1 << 16), key=len)


def slice_of(ports: range, worker: int, workers: int) -> range:
    """Return the part of one of `workers` test processes."""
    each = len(ports) // workers
    return ports[worker * each : (worker + 1) * each]


def _own() -> range:
    first, last = map(int, EPHEMERAL.read_text().split()) if EPHEMERAL.exists() else (32_768, 65_535)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return slice_of(outside(first, last), worker, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


class Ports:
    """The next port to try in a range."""

    def __init__(self, own: range, start: int) -> None:
        self._own, self._next = own, start

    def base(self, count: int) -> int:
        """Return a port such that it and the `count` - 1 above it are free; none is returned twice before all have
        been. Raises OSError if there is no such place."""
        for _ in range(2 * len(self._own)):
            if self._next + count > len(self._own):
                self._next = 0
            found = self._own[self._next : self._next + count]
            try:
                with ExitStack() as stack:
                    for port in found:
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                self._next += 1
                continue
            self._next += count
            return found[0]
        raise OSError(f"no {count} free ports in a row from {self._own[0]} to {self._own[-1]}")


_OWN = _own()
_PORTS = Ports(_OWN, random.Random(os.getpid()).randrange(len(_OWN)))  # another run beside this begins elsewhere


def free_base(count: int) -> int:
    return _PORTS.base(count)


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports of the loopback address."""
    return [_PORTS.base(1) for _ in range(count)]


def free_port() -> int:
    return _PORTS.base(1)
