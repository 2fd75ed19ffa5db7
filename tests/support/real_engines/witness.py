"""Follows an engine's cache events by a subscriber that shares no code with the picker.

The formats are those of vLLM's `vllm/distributed/kv_events.py` (0.32), and SGLang's (0.5.23) are the same: live
messages of topic, sequence number (8 bytes, big-endian) and a msgpack batch `[ts, events, rank]`, each event a map with
its `type`. A block is stored once for each copy and removed once for each, so copies are counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from types import TracebackType
from typing import Any

import msgspec
import zmq

WAIT_MS = 50
_U64 = (1 << 64) - 1


class Witness:
    """Listens in a thread, from before the engine starts: a later subscriber would miss events. `with Witness(port) as
    witness`. Hashes are unsigned 64-bit numbers, as the picker shows them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._copies: Counter[int] = Counter()
        self._next_seq = 0
        self._missed = self._evicted = 0
        self._broken: Exception | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def blocks(self) -> set[int]:
        """Return the hashes of the stored blocks. Raises RuntimeError after an unreadable message."""
        with self._lock:
            if self._broken is not None:
                raise RuntimeError(f"the witness could not read a message: {self._broken!r}") from self._broken
            return set(self._copies)

    @property
    def next_seq(self) -> int:
        """Return the number of the next batch."""
        with self._lock:
            return self._next_seq

    @property
    def missed(self) -> int:
        """Return the batches lost since the cache was last emptied: anything but 0 makes `blocks` worthless."""
        with self._lock:
            return self._missed

    @property
    def evicted(self) -> int:
        """Return how many copies were removed so far."""
        with self._lock:
            return self._evicted

    def _listen(self) -> None:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(1))
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            sock = stack.enter_context(context.socket(zmq.SUB))
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RECONNECT_IVL, 20)
            sock.setsockopt(zmq.RCVHWM, 0)
            sock.subscribe(b"")
            sock.connect(f"tcp://127.0.0.1:{self._port}")
            while not self._ending.is_set():
                if sock.poll(WAIT_MS):
                    self._hear(sock.recv_multipart())

    def _hear(self, message: list[bytes]) -> None:
        with self._lock:
            try:
                _topic, seq, payload = message
                self._apply(int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload))
            except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
                self._broken = error

    def _apply(self, seq: int, batch: list[Any]) -> None:
        if seq < self._next_seq:  # another process behind the same port
            self._copies.clear()
            self._next_seq = 0
        self._missed += seq - self._next_seq
        self._next_seq = seq + 1
        for event in batch[1]:
            match event["type"]:
                case "BlockStored":
                    self._copies.update(block & _U64 for block in event["block_hashes"])
                case "BlockRemoved":
                    self._copies.subtract(block & _U64 for block in event["block_hashes"])
                    self._copies = +self._copies
                    self._evicted += len(event["block_hashes"])
                case "AllBlocksCleared":
                    self._copies.clear()
                    self._missed = 0
                case other:
                    raise ValueError(f"an event of type {other!r}")
