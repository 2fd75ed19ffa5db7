"""The socket at which other runtimes ask for cached pages: a thread of the scheduler's process, which has the pages.

It parses and bounds requests, passes them to the scheduler (`Lending`), and sends what that answers. A peer asks for
the next chunk when it has got one (`WINDOW`), so a slow one delays itself. Chunks that ZMQ has not sent count as in
flight, whoever they are for; when there are too many, requests are refused, and the peers compute.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from treeline_wire.pages import (
    MOST_REQUEST_BYTES,
    WINDOW,
    Answer,
    Buffer,
    GetRequest,
    Held,
    Later,
    Pages,
    Request,
    encode_answer,
    parse_request,
)

from treeline_runtime.args import ServerArgs
from treeline_runtime.listeners import open_keys
from treeline_runtime.processes import StartError
from treeline_runtime.publisher.peers import LOOK_S, Peers
from treeline_runtime.scheduler.lending import Lending

MOST_IN_FLIGHT = 16
"""Chunks (`PageFormat.chunk_pages`) being prepared or sent: they are copies, in memory of their own."""
MOST_ASKED = 64
"""Requests without an answer, of all peers."""
REQUESTS_A_TURN = 16
HANDSHAKE_MS = 5000
HEARTBEAT_MS = 2000
"""A connection that is silent for longer is ended, and with it what waits to be sent."""


class PageServer:
    """Owns the socket and its thread, until `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        args: ServerArgs,
        rank: int,
        lending: Lending,
        wake: Callable[[], None],
    ) -> None:
        """wake: called in the thread when the scheduler has something to do. Raises StartError, EventsError."""
        keys, host = open_keys(args)
        self._lending = lending
        self._wake = wake
        self._answers: queue.SimpleQueue[tuple[bytes, Answer, Buffer]] = queue.SimpleQueue()
        self._answered = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked = Counter[bytes]()
        """Requests without an answer, by peer."""
        self._chunks = 0
        """Those of them that ask for pages."""
        self._sending: list[zmq.MessageTracker] = []
        self._socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        made = self._socket
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 8 * WINDOW),
            (zmq.RCVHWM, 2 * WINDOW),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.ROUTER_MANDATORY, 1),  # a full or vanished peer is an error, not a silent drop
            (zmq.MAXMSGSIZE, MOST_REQUEST_BYTES),
            (zmq.IPV6, ":" in host),
        ):
            made.setsockopt(option, value)
        if keys is not None:
            keys.secure_server(made)
        port = args.kv_transfer_port + rank if args.kv_transfer_port else "*"
        try:
            made.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise StartError(f"--kv-transfer-port: cannot bind {host}:{port}: {error}") from None
        self.port = int(made.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]) - rank
        """That of rank 0, from which the others count up: `/server_info` shows what one of them, any, says."""
        self._peers = Peers(made, 2 * MOST_REQUEST_BYTES)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="treeline page server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._answered, 1)
        self._thread.join()
        self._peers.close()
        self._socket.close()
        os.close(self._answered)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._answered, zmq.POLLIN)
        look_at = 0.0
        while not self._closing:
            ready = dict(poller.poll(int(LOOK_S * 1000)))
            if self._answered in ready:
                os.eventfd_read(self._answered)
            while not self._answers.empty():
                self._send(*self._answers.get())
            if self._socket in ready:
                self._accept()
            if (now := time.monotonic()) >= look_at:
                look_at = now + LOOK_S
                self._peers.look(now)
                for peer in self._asked:  # a step of the model takes longer than they wait for a silent one
                    with suppress(zmq.ZMQError):
                        self._socket.send_multipart([peer, *encode_answer(Later())], zmq.NOBLOCK)

    def _accept(self) -> None:
        """Takes a bounded number of requests."""
        for _ in range(REQUESTS_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, fd = frames[0].bytes, int(frames[0].get(zmq.SRCFD))
            if self._asked[peer] > WINDOW or (request := parse_request([one.bytes for one in frames[1:6]])) is None:
                continue  # no runtime does so
            self._peers.asked(fd)
            self._take(peer, request)

    def _take(self, peer: bytes, request: Request) -> None:
        asks_chunk = isinstance(request, GetRequest)
        self._sending = [tracker for tracker in self._sending if not tracker.done]
        self._asked[peer] += 1
        self._chunks += asks_chunk
        if self._asked.total() > MOST_ASKED or self._chunks + len(self._sending) > MOST_IN_FLIGHT:
            self._send(peer, Pages(request.number) if isinstance(request, GetRequest) else Held(0), b"")
            return

        def tell(answer: Answer, data: Buffer) -> None:
            self._answers.put((peer, answer, data))
            os.eventfd_write(self._answered, 1)

        self._lending.ask(request, tell)
        self._wake()

    def _send(self, peer: bytes, answer: Answer, data: Buffer) -> None:
        self._asked[peer] -= 1
        if not self._asked[peer]:
            del self._asked[peer]
        self._chunks -= isinstance(answer, Pages)
        try:
            tracker = self._socket.send_multipart(
                [peer, *encode_answer(answer, data)], zmq.NOBLOCK, copy=False, track=True
            )
        except zmq.ZMQError:  # it has gone, or takes nothing
            return
        if data and tracker is not None:
            self._sending.append(tracker)
