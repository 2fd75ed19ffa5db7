"""Several machines compute one model. Node 0 has rank 0 and serves; the others run their ranks for it.

Each rank of another node has a TCP connection to rank 0. It begins with `Hello` in a line of JSON; the answer is an
empty line, or a line that says why this rank is not wanted. Then the connection is the standard input and output of the
rank's process, as a socket pair is for the ranks of node 0. No torch here.

Nothing on this connection is secret or signed, nor is what the ranks send each other: the network between the nodes has
to be closed to others.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import msgspec

from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError, EngineConfig, meeting_place
from treeline_runtime.processes import how_ended, spawn

RANK_MODULE = "treeline_runtime.scheduler.ranks.process"
TURN_S = 0.5
GREETING_S = 3.0
"""Time for a rank's line."""
MOST_STRANGERS = 64
"""Connections that may be about to introduce themselves; others wait to be accepted."""
MOST_BYTES = 4096
REMIND_S = 10.0
LOST_S = 15
"""A machine that does not answer for so long is lost."""

logger = logging.getLogger("treeline")


class Hello(msgspec.Struct, frozen=True):
    """A rank of another node introduces itself."""

    node: int
    slot: int
    """Its number among the node's ranks."""
    ranks: int
    version: str
    model: str
    """The checkpoint's folder on its node."""
    checkpoint: str
    """See `digest_of`."""


Greeting = tuple[Hello, socket.socket, str]
"""Who has connected, the connection, and the address from which it came."""


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


def meet(config: EngineConfig, listener: socket.socket, check: Callable[[], None]) -> Iterator[Greeting]:
    """Yields the greetings of all ranks of the other nodes, in any order. check: called twice a second; may raise."""
    missing = {(node, slot) for node in range(1, config.nnodes) for slot in range(config.ranks_here)}
    checkpoint, reminder = digest_of(Path(config.model)), Reminder()
    greetings = queue.SimpleQueue[Greeting]()
    threading.Thread(target=_accept, args=(listener, greetings.put), name="accept ranks", daemon=True).start()
    while missing:
        check()
        nodes = ", ".join(map(str, sorted({node for node, _ in missing})))
        reminder.say("waiting at %s:%d for the ranks of node %s", *listener.getsockname()[:2], nodes)
        try:
            hello, connection, address = greetings.get(timeout=TURN_S)
        except queue.Empty:
            continue
        refusal = _refusal(hello, missing, config, checkpoint)
        with contextlib.suppress(OSError):
            connection.sendall(f"{refusal}\n".encode())
        if refusal or has_ended(connection):
            _refuse(connection, address, refusal or "it has closed the connection")
            continue
        missing.remove((hello.node, hello.slot))
        yield hello, connection, address


def _accept(listener: socket.socket, on_greeting: Callable[[Greeting], None]) -> None:
    """Until the listener is closed. Each connection has a thread: one that says nothing keeps no other waiting."""
    threads = threading.BoundedSemaphore(MOST_STRANGERS)

    def hear(connection: socket.socket, address: str) -> None:
        with threads:
            try:
                hello = msgspec.json.decode(_line(connection, GREETING_S), type=Hello)
                _watched(connection)
            except (OSError, ValueError, RecursionError) as error:
                _refuse(connection, address, f"it did not introduce itself as a rank: {error}")
            else:
                on_greeting((hello, connection, address))

    while listener.fileno() >= 0:
        with contextlib.suppress(OSError):  # nobody came, or has gone already
            with threads:
                connection, (address, *_) = listener.accept()
            threading.Thread(target=hear, args=(connection, address), daemon=True).start()


def _refuse(connection: socket.socket, address: str, why: str) -> None:
    logger.warning("a connection from %s was refused: %s", address, why)
    connection.close()


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
            if ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_unspecified:
                listener.close()
                raise ConfigError(f"--dist-init-addr: {host} is no address at which other machines reach this one")
            listener.settimeout(TURN_S)
            return listener


def _refusal(hello: Hello, missing: Set[tuple[int, int]], config: EngineConfig, checkpoint: str) -> str:
    version = _version()
    if hello.version != version:
        return f"it has Treeline {hello.version}, node 0 has {version}"
    if not 0 < hello.node < config.nnodes or hello.ranks != config.ranks_here or not 0 <= hello.slot < hello.ranks:
        return (
            f"rank {hello.slot} of the {hello.ranks} of node {hello.node} does not belong to the {config.nnodes} "
            f"machines with {config.ranks_here} ranks each that node 0 knows: give all of them the same --nnodes, "
            "--tp-size and --pp-size"
        )
    if hello.checkpoint != checkpoint:
        return f"its checkpoint in {hello.model} is not that of node 0: config.json or the sizes of weights differ"
    if (hello.node, hello.slot) not in missing:
        return f"rank {hello.slot} of node {hello.node} is there already: give each machine a --node-rank of its own"
    return ""


def digest_of(model: Path) -> str:
    """A digest of config.json and of the names and sizes of weight files: enough to tell most checkpoints apart."""
    digest = hashlib.blake2b(digest_size=16)
    with contextlib.suppress(OSError):  # the loader says what is missing
        digest.update((model / "config.json").read_bytes())
        files = sorted((file.name, file.stat().st_size) for file in model.glob("*.safetensors"))
        digest.update(repr(files).encode())
    return digest.hexdigest()


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it, even if there is something to be read."""
    events = select.poll()
    events.register(connection, select.POLLRDHUP)
    return bool(events.poll(0))


def _watched(connection: socket.socket) -> None:
    """From now on it blocks, and ends once the other machine has not answered for `LOST_S`."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _version() -> str:
    return importlib.metadata.version("treeline-runtime")


# ---- other nodes --------------------------------------------------------------------------------------------------


def run_node(args: ServerArgs, model: Path) -> int:
    """Runs this node's ranks until rank 0 ends or one of them does; returns the exit status.

    SIGTERM lets rank 0 finish its requests: whoever ends the group tells all nodes at once. Raises ConfigError.
    """
    asked: list[int] = []
    ranks: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def on_signal(number: int, _frame: object) -> None:
        if number == signal.SIGTERM and not asked and ranks:
            asked.append(number)
            logger.info("SIGTERM: going on until rank 0 has ended; a second one ends at once")
            return
        os._exit(128 + number)  # the ranks end with this process

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    streams = _connect(args, model)
    children = [spawn(RANK_MODULE, stream) for stream in streams]
    ranks.update((child.pid, (child, stream)) for child, stream in zip(children, streams, strict=True))
    logger.info("node %d computes for rank 0 at %s", args.node_rank, args.dist_init_addr)
    ended = os.wait()
    while ended[0] not in ranks:  # process 1 of a container gets orphans
        ended = os.wait()
    (child, stream), status = ranks[ended[0]], os.waitstatus_to_exitcode(ended[1])
    if status == 0:
        logger.log(logging.INFO if asked else logging.ERROR, "rank 0 has ended; stopping")
        return 0 if asked else 1
    with contextlib.suppress(OSError):  # rank 0 heard of it from the rank itself, unless that was killed
        stream.sendall(msgspec.json.encode(LastWords(f"its process {how_ended(status)}", follows=False)) + b"\n")
    logger.error("the process of rank %d of this node %s; stopping", children.index(child), how_ended(status))
    return 1


def _connect(args: ServerArgs, model: Path) -> list[socket.socket]:
    """Waits until rank 0 is there, and introduces this node's ranks. Raises ConfigError if one is not wanted."""
    assert args.dist_init_addr is not None
    place, here, checkpoint = meeting_place(args.dist_init_addr), args.ranks_here, digest_of(model)
    streams: list[socket.socket] = []
    reminder = Reminder()
    while len(streams) < here:
        if any(map(has_ended, streams)):
            raise ConfigError(f"rank 0 at {place[0]}:{place[1]} has ended before all ranks had met")
        hello = Hello(args.node_rank, len(streams), here, _version(), str(model.absolute()), checkpoint)
        try:
            stream = socket.create_connection(place, GREETING_S)
            _watched(stream)
            stream.sendall(msgspec.json.encode(hello) + b"\n")
            refusal = _line(stream, LOST_S).decode().strip()
            stream.settimeout(None)
        except OSError as error:
            reminder.say("waiting for rank 0 at %s:%d: %s", *place, error)
            time.sleep(TURN_S)
            continue
        if refusal:
            raise ConfigError(f"rank 0 at {place[0]}:{place[1]} refuses this node: {refusal}")
        # this side always has something to say, and rank 0 a thread that hears it
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)
        streams.append(stream)
    return streams


def _line(connection: socket.socket, seconds: float) -> bytes:
    """Reads a line and not a byte more: what follows is for the rank. Raises OSError, also after so many seconds."""
    line, until = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        byte = connection.recv(1)
        if not byte or len(line) == MOST_BYTES:
            raise ConnectionError("it sent no complete line")
        line += byte
    return line
