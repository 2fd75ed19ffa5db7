"""The event stream as a machine without sockets: updates and requests in, frames out.

Live batches are numbered from 0 and kept in a ring of the last `RING_BATCHES`. A request (hello, replay, snapshot) is
answered by an iterator of messages whose content is fixed at the moment of the request; the driver takes a few messages
at a time, so a big answer never holds up live events, and live events never change an answer under way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from treeline_wire import frames
from treeline_wire.events import encode_batch

from treeline_runtime.messages import CacheUpdate
from treeline_runtime.publisher.announced_index import AnnouncedIndex, Page, parents_first, runs

TOPIC = b""
"""The first frame of each message: everybody's subscription has all."""
RING_BATCHES = 10_000
SNAPSHOT_PAGES_A_CHUNK = 2048

Message = list[bytes]
"""The frames of one ZMQ message."""


class EventStream:
    """One publisher's numbered event stream. `epoch`: random, not 0, new with every start."""

    def __init__(self, epoch: int, index: AnnouncedIndex, *, ring_batches: int = RING_BATCHES) -> None:
        self.epoch = epoch
        self.index = index
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_batches)
        self._next_seq = 0

    @property
    def newest(self) -> int | None:
        """The last published number; None before the first batch."""
        return self._next_seq - 1 if self._next_seq else None

    @property
    def oldest(self) -> int | None:
        """The oldest number that can still be replayed."""
        return self._ring[0][0] if self._ring else None

    def on_update(self, update: CacheUpdate, ts: float) -> Message | None:
        """One scheduler step → one live message; None if it held nothing to announce. `ts`: Unix seconds."""
        events = self.index.apply(update.events)
        if not events:
            return None
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload = encode_batch(ts, events)
        self._ring.append((seq, payload))
        return frames.live(TOPIC, seq, payload)

    def on_request(self, message: Message) -> Iterator[Message] | None:
        """Frames after the identity → the answer; None for a message that gets no answer."""
        match frames.parse_request(message):
            case frames.ReplayRequest(start_seq=start):
                return self._replay(start, list(self._ring))
            case frames.HelloRequest():
                return iter([frames.encode_reply(frames.Hello(self.epoch, self.oldest, self.newest))])
            case frames.SnapshotRequest():
                return self._snapshot(self.index.pages(), -1 if self.newest is None else self.newest)
            case _:
                return None

    def _replay(self, start: int, ring: list[tuple[int, bytes]]) -> Iterator[Message]:
        for seq, payload in ring:
            if seq >= start:
                yield frames.encode_reply(frames.ReplayItem(TOPIC, seq, payload))
        yield frames.encode_reply(frames.ReplayEnd())

    def _snapshot(self, pages: dict[int, Page], seq: int) -> Iterator[Message]:
        announced = sum(page.announced for page in pages.values())
        yield frames.encode_reply(frames.SnapshotHeader(self.epoch, seq, announced))
        ordered = parents_first(pages)
        while chunk := list(itertools.islice(ordered, SNAPSHOT_PAGES_A_CHUNK)):
            yield frames.encode_reply(frames.SnapshotChunk(list(runs(chunk))))
        yield frames.encode_reply(frames.SnapshotEnd())
