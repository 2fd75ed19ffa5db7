"""For the publisher's tests: a randomly changing cache, a router that trusts events, the process."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
from treeline_runtime.args import ServerArgs
from treeline_runtime.ipc import Addresses, AnnouncedReq, Heartbeat, Inbox, Outbox, Ready, decode_to_http
from treeline_runtime.messages import Reply
from treeline_runtime.processes import ChildSpec
from treeline_runtime.published import CacheEvent, CacheUpdate, Cleared, Removed, Stored
from treeline_wire import frames
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from treeline_wire.security import CurveKeys

from support.runtime_server import eventually

PAGE = 2


class Cutting:
    """A re-encoder that agrees up to a fixed position (or to the end of the prompt, if that is later)."""

    def __init__(self, at: int) -> None:
        self._at = at

    def agreed_len(self, ids: Sequence[int], sampled_from: int) -> int:
        return min(len(ids), max(self._at, sampled_from))


class Cache:
    """A tree of pages as a scheduler reports it: runs stored below a page, removed leaves, and an occasional flush."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = 1
        self.pages: dict[int, int | None] = {}

    def step(self) -> list[CacheEvent]:
        return [self._event() for _ in range(self._rng.randint(1, 3))]

    def _event(self) -> CacheEvent:
        roll = self._rng.random()
        if roll < 0.02:
            self.pages.clear()
            return Cleared()
        if roll < 0.4 and self.pages:
            return self._evict()
        return self._store()

    def _store(self) -> Stored:
        parent = self._rng.choice([None, *self.pages])
        hashes = list(range(self._next, self._next + self._rng.randint(1, 4)))
        self._next += len(hashes)
        tokens = [self._rng.randrange(100) for _ in range(PAGE * len(hashes))]
        above = parent
        for block in hashes:
            self.pages[block] = above
            above = block
        return Stored(hashes, parent, tokens, None, self._rng.randint(0, len(tokens)))

    def _evict(self) -> Removed:
        gone: list[int] = []
        for _ in range(self._rng.randint(1, 3)):
            leaves = sorted(set(self.pages) - set(self.pages.values()))  # type: ignore[arg-type]
            if leaves:
                gone.append(self._rng.choice(leaves))
                del self.pages[gone[-1]]
        return Removed(gone)


class Consumer:
    """Rebuilds hash → (parent, tokens) from events alone."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.orphans: list[int] = []

    def apply(self, events: Iterable[object]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.pages[block]
                case AllBlocksCleared():
                    self.pages.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for index, block in enumerate(event.block_hashes):
            if parent is not None and parent not in self.pages:
                self.orphans.append(block)
            self.pages[block] = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
            parent = block


class TrustingReencoder:
    """Treats every sampled token as if re-encoding gave it."""

    def agreed_len(self, ids: Sequence[int], sampled_from: int) -> int:
        return len(ids)


class PublisherProcess:
    """The process, seen from the scheduler (`send`), the HTTP process (`inbox`) and routers (sockets)."""

    EPOCH = 2**63 + 5

    def __init__(self, folder: Path, model: Path, **args: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)  # of all its sockets: a stranger's question is never delivered
        addresses = Addresses(str(folder))
        self.inbox = Inbox(self.context, addresses.of("http"), decode_to_http)
        self.outbox = Outbox(self.context, addresses.of("publisher"))
        defaults = ServerArgs(model=str(model), events_port=0, replay_port=0, load_port=0)
        spec = ChildSpec(replace(defaults, **args), addresses, str(model), self.EPOCH)
        command = [sys.executable, "-m", "treeline_runtime.publisher.process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self.process.stdin.flush()
        self.updates = 0
        self.keys: CurveKeys | None = None

    def started(self) -> PublisherProcess:
        message = self.heard()
        assert isinstance(message, Ready), message
        self.ports = message.info
        return self

    def heard(self) -> Any:
        """Return the next message, heartbeats left out."""
        while True:
            assert self.inbox.wait(60_000), "the publisher says nothing"
            (message,) = self.inbox.take(1)
            if not isinstance(message, Heartbeat):
                return message

    def store(self, *blocks: int, parent: int | None = None) -> None:
        tokens = [token for block in blocks for token in (block % 300, 7)]
        self.update(Stored(list(blocks), parent, tokens, None, len(tokens)))

    def update(self, *events: Any) -> None:
        self.updates += 1
        self.outbox.send(CacheUpdate(list(events)))

    def settled(self) -> dict[str, Any]:
        """Wait until all updates are applied; return the announced cache."""
        self.outbox.send(AnnouncedReq("q", self.updates))
        reply = self.heard()
        assert isinstance(reply, Reply)
        assert reply.data is not None
        return reply.data

    def socket(self, kind: int, port: str) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        if self.keys is not None:
            self.keys.secure_client(made)
        if kind == zmq.SUB:
            made.subscribe(b"")
        made.connect(f"tcp://127.0.0.1:{self.ports[port]}")
        return made

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.context.destroy(linger=0)

    def subscribed(self) -> zmq.Socket[bytes]:
        """Return a subscriber that has seen its first event: later ones cannot be missed."""
        events = self.socket(zmq.SUB, "events_port")
        number = iter(range(10_000, 20_000))

        def works() -> bool:
            self.store(next(number))
            return bool(events.poll(20))

        eventually(works, 60, "the subscription works")
        heard(events, self.settled()["seq"])
        return events


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(60_000), "nothing arrived"
    return socket.recv_multipart()


def heard(events: zmq.Socket[bytes], newest: int) -> None:
    """Read from a subscription up to the event of this number."""
    while frames.parse_live(receive(events))[1] < newest:
        pass
