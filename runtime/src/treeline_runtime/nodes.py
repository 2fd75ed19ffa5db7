"""Several machines compute one model. Node 0 has rank 0 and serves; the others run their ranks for it.

Each rank of another node has a TCP connection to rank 0. It begins with `Hello` in a line of JSON; the answer is an
empty line, or a line that says why this rank is not wanted. Then the connection is the standard input and output of the
rank's process, as a socket pair is for the ranks of node 0. No torch here.

Nothing on this connection is secret or signed, nor is what the ranks send each other: the network between the nodes has
to be closed to others.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError, EngineConfig, meeting_place
from treeline_runtime.processes import how_ended, spawn

RANK_MODULE = "treeline_runtime.scheduler.ranks.process"
TURN_S = 0.5
GREETING_S = 3.0
"""Time for a rank's line. One after another is heard."""
ANSWER_S = 60.0
MOST_BYTES = 4096
"""The longest line of a greeting."""
REMIND_S = 10.0
LOST_S = 15
"""A machine that does not answer for so long is lost."""

logger = logging.getLogger("treeline")


class Hello(msgspec.Struct, frozen=True):
    """A rank of another node introduces itself."""

    node: int
    slot: int
    """Its number among the node's ranks."""
    version: str
    model: str
    """The checkpoint's folder on its node."""


class LastWords(msgspec.Struct, tag=True, frozen=True):
    """A rank ends, and says why."""

    message: str
    follows: bool
    """It ends because another rank does not answer: that one knows the cause."""


class Reminder:
    """Logs what is waited for, at once and then every `REMIND_S`."""

    def __init__(self) -> None:
        self._next = 0.0

    def say(self, text: str, *args: object) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REMIND_S
            logger.info(text, *args)


# ---- node 0 -------------------------------------------------------------------------------------------------------


def meet(
    config: EngineConfig, listener: socket.socket, check: Callable[[], None]
) -> Iterator[tuple[Hello, socket.socket]]:
    """Yields the connections of all ranks of the other nodes, in any order. check: called twice a second; may raise."""
    missing = {(node, slot) for node in range(1, config.nnodes) for slot in range(config.ranks_here)}
    reminder = Reminder()
    while missing:
        check()
        nodes = ", ".join(map(str, sorted({node for node, _ in missing})))
        reminder.say("waiting at %s for the ranks of node %s (--node-rank)", config.dist_init_addr, nodes)
        try:
            connection, (host, *_) = listener.accept()
        except TimeoutError:
            continue
        try:
            hello = msgspec.json.decode(_line(connection, GREETING_S), type=Hello)
            refusal = _refusal(hello, missing, config)
            connection.sendall(f"{refusal}\n".encode())
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            refusal = f"it did not introduce itself as a rank: {error}"
        if refusal:
            logger.warning("a connection from %s was refused: %s", host, refusal)
            connection.close()
            continue
        _watched(connection)
        missing.remove((hello.node, hello.slot))
        yield hello, connection


def listen(config: EngineConfig) -> socket.socket:
    """Listens at the address that the other nodes know; waits until its name has one. Raises ConfigError."""
    assert config.dist_init_addr is not None
    host, port = meeting_place(config.dist_init_addr)
    reminder = Reminder()
    while True:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family)
        except socket.gaierror as error:  # a pod is often there before its name
            reminder.say("waiting until --dist-init-addr %s has an address: %s", host, error)
            time.sleep(TURN_S)
        except OSError as error:
            raise ConfigError(
                f"--dist-init-addr: cannot listen on {host}:{port}, which must be an address of this machine, with a "
                f"free port: {error}"
            ) from None
        else:
            listener.settimeout(TURN_S)
            return listener


def _refusal(hello: Hello, missing: set[tuple[int, int]], config: EngineConfig) -> str:
    """Returns why the rank is not wanted, or nothing."""
    version = _version()
    if hello.version != version:
        return f"it has Treeline {hello.version}, node 0 has {version}"
    if (hello.node, hello.slot) in missing:
        return ""
    known = 0 < hello.node < config.nnodes and 0 <= hello.slot < config.ranks_here
    told = f"rank {hello.slot} of node {hello.node}"
    if known:
        return f"{told} is there already: give each machine a --node-rank of its own"
    return f"there is no {told}: node 0 has {config.nnodes} machines (--nnodes) and {config.ranks} ranks"


def _watched(connection: socket.socket) -> None:
    """From now on it blocks, and fails once the other machine has not answered for `LOST_S`."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)


def _line(connection: socket.socket, seconds: float) -> bytes:
    """Reads a line and not a byte more. Raises OSError."""
    line, until = bytearray(), time.monotonic() + seconds
    connection.settimeout(seconds)
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) == MOST_BYTES or time.monotonic() > until:
            raise ConnectionError("the first line did not come, or was too long")
        line += byte
    return bytes(line)


def _version() -> str:
    return importlib.metadata.version("treeline-runtime")


# ---- other nodes --------------------------------------------------------------------------------------------------


def run_node(args: ServerArgs, model: Path) -> int:
    """Runs this node's ranks until rank 0 ends or one of them does; returns the exit status.

    SIGTERM lets rank 0 finish its requests: whoever ends the group tells all nodes at once. Raises ConfigError.
    """
    asked: list[int] = []
    ranks: dict[int, tuple[socket.socket, int]] = {}

    def on_signal(number: int, _frame: object) -> None:
        if number == signal.SIGTERM and not asked and ranks:
            asked.append(number)
            logger.info("SIGTERM: going on until rank 0 has ended; a second one ends at once")
            return
        os._exit(128 + number)  # the ranks end with this process

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    for slot in range(args.ranks_here):
        connection = _connect(args, Hello(args.node_rank, slot, _version(), str(model.absolute())))
        ranks[spawn(RANK_MODULE, connection).pid] = connection, slot
    logger.info("node %d computes for rank 0 at %s", args.node_rank, args.dist_init_addr)
    pid, wait_status = os.wait()
    connection, slot = ranks[pid]
    status = os.waitstatus_to_exitcode(wait_status)
    if status == 0:
        logger.log(logging.INFO if asked else logging.ERROR, "rank 0 has ended; stopping")
        return 0 if asked else 1
    with contextlib.suppress(OSError):  # rank 0 heard of it from the rank itself, unless that was killed
        connection.sendall(msgspec.json.encode(LastWords(f"its process {how_ended(status)}", follows=False)) + b"\n")
    logger.error("the process of rank %d of this node %s; stopping", slot, how_ended(status))
    return 1


def _connect(args: ServerArgs, hello: Hello) -> socket.socket:
    """Waits until rank 0 is there, and introduces a rank. Raises ConfigError if it is not wanted."""
    assert args.dist_init_addr is not None
    place = meeting_place(args.dist_init_addr)
    reminder = Reminder()
    while True:
        try:
            connection = socket.create_connection(place, GREETING_S)
            connection.sendall(msgspec.json.encode(hello) + b"\n")
            refusal = _line(connection, ANSWER_S).decode(errors="replace").strip()
        except OSError as error:
            reminder.say("waiting for rank 0 at %s:%d: %s", *place, error)
            time.sleep(TURN_S)
            continue
        if refusal:
            raise ConfigError(f"rank 0 at {place[0]}:{place[1]} refuses this node: {refusal}")
        _watched(connection)
        return connection
