"""The publisher process: the sockets around `EventStream` and `LoadStream`.

One loop over four sockets: inbox (from scheduler and HTTP process), event PUB, replay ROUTER, load PUB. Live events
come first. Replays and snapshots advance a few messages per turn, so a slow client delays only itself.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq
from tokenizers import Tokenizer

from treeline_runtime import ipc
from treeline_runtime.listeners import open_keys
from treeline_runtime.messages import DrainReq, Reply
from treeline_runtime.processes import ChildSpec, StartError, run_child
from treeline_runtime.published import CacheUpdate, LoadUpdate
from treeline_runtime.publisher.announced_index import AnnouncedIndex, TokenizerReencoder
from treeline_runtime.publisher.peers import LOOK_S, Peers
from treeline_runtime.publisher.streams import EventStream, LoadStream, Message

PUB_HWM = 10_000
"""Batches kept for a slow subscriber before it loses some (and notices by seq): as many as can be replayed."""
LOAD_HWM = 8
ANSWERS_HWM = 64
REQUESTS_HWM = 16
ANSWERS_A_CLIENT = 4
"""Running requests of one client; more are dropped."""
MOST_CLIENTS = 32
"""Clients with running requests: a snapshot copies all announced blocks. Other clients ask again."""
REQUESTS_A_TURN = 16
TURN_S = 0.002
"""Time for answers between checks of the inbox, and so the longest delay of a live event."""
RETRY_S = 0.005
STALLED_S = 30.0
"""An answer is dropped if its client takes nothing for this long."""
MAX_REQUEST_BYTES = 1024
MAX_REQUEST_FRAMES = 5
SUBSCRIBER_BYTES = 8 << 10
"""Bytes that a subscriber may send at once: a handshake and its subscriptions."""
CLIENT_BYTES = 64 << 10
HANDSHAKE_MS = 5000

logger = logging.getLogger(__name__)


@dataclass
class _Client:
    """Running answers to one client, in order."""

    moved_at: float
    """When the client last took a message, in monotonic seconds."""
    answers: deque[Iterator[Message]] = field(default_factory=deque)
    held: Message | None = None
    """A message that did not fit into the client's queue."""

    def next(self) -> Message | None:
        """The message to send; None when all answers are complete."""
        if self.held is not None:
            return self.held
        while self.answers:
            message = next(self.answers[0], None)
            if message is not None:
                return message
            self.answers.popleft()
        return None


class Publisher:
    """Owns the sockets. `run` never returns; the process ends with its parent."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], spec: ChildSpec, stream: EventStream, load: LoadStream
    ) -> None:
        args = spec.args
        self._stream = stream
        self._load = load
        self._updates = 0
        self._questions: list[ipc.AnnouncedReq] = []
        self._clients: dict[bytes, _Client] = {}
        self._keys, host = open_keys(args)
        self._host = f"[{host}]" if ":" in host else host
        self._inbox = ipc.Inbox(context, spec.addresses.of("publisher"), ipc.decode_to_publisher)
        self._http = ipc.Outbox(context, spec.addresses.of("http"))
        self._heartbeat = ipc.HeartbeatSender("publisher", self._http)
        self._events, events_port = self._bind(context, zmq.PUB, args.events_port + spec.rank, "--events-port", PUB_HWM)
        self._router, replay_port = self._bind(
            context, zmq.ROUTER, args.replay_port + spec.rank, "--replay-port", ANSWERS_HWM
        )
        self._loads, load_port = self._bind(context, zmq.PUB, args.load_port + spec.rank, "--load-port", LOAD_HWM)
        self._subscribers = [Peers(sock, SUBSCRIBER_BYTES) for sock in (self._events, self._loads)]
        self._askers = Peers(self._router, CLIENT_BYTES)
        self._look_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        ports = {"events_port": events_port, "replay_port": replay_port, "load_port": load_port}
        self._http.send(ipc.Ready("publisher", {"host": host, "curve": self._keys is not None, **ports}))

    def _bind(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, port: int, flag: str, hwm: int
    ) -> tuple[zmq.Socket[bytes], int]:
        made = context.socket(kind)
        made.setsockopt(zmq.SNDHWM, hwm)
        made.setsockopt(zmq.RCVHWM, REQUESTS_HWM)
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, 1 if ":" in self._host else 0)
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or vanished client is an error, not a silent drop
        made.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # subscribers write, too: their subscriptions
        if self._keys is not None:
            self._keys.secure_server(made)
        try:
            made.bind(f"tcp://{self._host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise StartError(f"{flag}: cannot bind {self._host}:{port}: {error}") from None
        return made, int(made.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def run(self) -> None:
        while True:
            self._heartbeat.beat()
            self._poller.poll(self._wait_ms(time.monotonic()))
            self._look(time.monotonic())
            for message in self._inbox.take():
                self._take(message)
            self._questions = [question for question in self._questions if not self._told(question)]
            self._accept()
            self._answer()
            for report in self._load.take(time.monotonic()):
                self._loads.send_multipart(report, zmq.NOBLOCK)

    def _wait_ms(self, now: float) -> int:
        wait_s = min(max(0.0, self._load.due_at() - now), ipc.HEARTBEAT_S, LOOK_S)
        if self._clients:
            # clients with a full queue are retried soon, others at once
            full = all(client.held is not None for client in self._clients.values())
            wait_s = min(wait_s, RETRY_S) if full else 0.0
        return int(wait_s * 1000 + 0.999)

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for peers in (*self._subscribers, self._askers):
            if ended := peers.look(now):
                logger.warning("ended %d connections: too many, or they sent too much", ended)

    def _take(self, message: CacheUpdate | LoadUpdate | DrainReq | ipc.AnnouncedReq) -> None:
        match message:
            case CacheUpdate():
                self._updates += 1
                live = self._stream.on_update(message, time.time())
                if live is not None:
                    self._events.send_multipart(live, zmq.NOBLOCK)  # PUB never blocks: it drops at the mark
            case LoadUpdate():
                self._stream.index.names |= {digest: name for name, digest in message.digests.items()}
                self._load.on_load(message, time.monotonic())
            case DrainReq():
                self._load.on_draining()
            case ipc.AnnouncedReq():
                self._questions.append(message)

    def _told(self, question: ipc.AnnouncedReq) -> bool:
        if self._updates < question.after_updates:
            return False
        data = {"seq": self._stream.newest, "hashes": self._stream.index.announced()}
        self._http.send(Reply(question.id, data=data))
        return True

    def _accept(self) -> None:
        """Takes a bounded number of waiting requests."""
        for _ in range(REQUESTS_A_TURN):
            try:
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames, fd = [frame.bytes], int(frame.get(zmq.SRCFD))
            while frame.more:
                frame = self._router.recv(copy=False)
                if len(frames) <= MAX_REQUEST_FRAMES:
                    frames.append(frame.bytes)
            identity, *message = frames
            client = self._clients.get(identity) or _Client(moved_at=time.monotonic())
            room = identity in self._clients or len(self._clients) < MOST_CLIENTS
            answer = self._stream.on_request(message) if room and len(client.answers) < ANSWERS_A_CLIENT else None
            if answer is not None:
                self._askers.asked(fd)
                client.answers.append(answer)
                self._clients[identity] = client

    def _answer(self) -> None:
        """Advances each answer by at least one message, all together for about `TURN_S`."""
        turn_ends = time.monotonic() + TURN_S
        for identity, client in list(self._clients.items()):
            try:
                going_on = self._advance(identity, client, turn_ends)
            except zmq.ZMQError as error:
                logger.debug("a client disconnected during its answer: %s", error)
                going_on = False
            if not going_on:
                del self._clients[identity]

    def _advance(self, identity: bytes, client: _Client, turn_ends: float) -> bool:
        """False if nothing is left to send or the client takes nothing."""
        while (message := client.next()) is not None:
            now = time.monotonic()
            client.held = message
            try:
                self._router.send_multipart([identity, *message], zmq.NOBLOCK)
            except zmq.Again:
                if now - client.moved_at <= STALLED_S:
                    return True
                logger.warning("a client did not read its replay or snapshot for %.0f s; dropped", STALLED_S)
                return False
            client.held, client.moved_at = None, now
            if now >= turn_ends:
                return True
        return False


def run(spec: ChildSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    tokenizer = Tokenizer.from_file(f"{spec.model_dir}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    index = AnnouncedIndex(TokenizerReencoder(tokenizer))
    stream = EventStream(spec.epoch, index, topic=spec.args.kv_events_topic.encode(), rank=spec.rank)
    Publisher(context, spec, stream, LoadStream(spec.epoch, spec.args.page_size, spec.rank)).run()


if __name__ == "__main__":
    sys.exit(run_child("publisher", run))
