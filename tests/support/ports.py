"""Ports that nobody holds.

They come from below the range that the system uses for outgoing connections, so that none of those takes a port between
its choice and the moment a server binds it; parallel test workers choose from ranges of their own.
"""

import itertools
import os
import random
import socket
from contextlib import ExitStack

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST, SPAN = 10_000, 5_500
_next = itertools.count(random.Random(os.getpid()).randrange(SPAN))


def free_base(count: int) -> int:
    """A port such that it and the `count` - 1 above it are free; no earlier call in this process returned any."""
    while True:
        offset = next(_next) % (SPAN - count)
        base = FIRST + (WORKER % 4) * SPAN + offset
        try:
            with ExitStack() as stack:
                for port in range(base, base + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        for _ in range(count - 1):
            next(_next)
        return base


def free_ports(count: int) -> list[int]:
    """`count` different ports of the loopback address that are free."""
    return [free_base(1) for _ in range(count)]


def free_port() -> int:
    return free_base(1)
