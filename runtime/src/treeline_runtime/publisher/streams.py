"""The publisher's protocol without sockets: updates, loads and requests in, frames out.

Events: live batches are numbered from 0 and kept in a ring of the last `RING_BATCHES`. A request (hello, replay,
snapshot) is answered by an iterator whose content is fixed at that moment; the driver takes a few messages at a time,
so a large answer delays no live events, and these do not change it.

Load reports: after changes at most 20 times a second, else once a second; at once when the last request ends and when
the engine drains. They stop when the scheduler is silent, so that routers notice a hang.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import msgspec
from treeline_wire import frames
from treeline_wire.events import encode_batch
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad, encode

from treeline_runtime.published import CacheUpdate, LoadUpdate, Medium
from treeline_runtime.publisher.announced_index import AnnouncedIndex, Page, parents_first, runs

RING_BATCHES = 10_000
SNAPSHOT_PAGES_A_CHUNK = 2048

MIN_INTERVAL_S = 0.05
HEARTBEAT_S = 1.0
STILL_AFTER_S = 3.0
"""Reports stop after this silence of the scheduler, which speaks every half second."""

Message = list[bytes]
"""The frames of a ZMQ message."""


class EventStream:
    """A publisher's numbered event stream. `epoch`: random, not 0, new at every start. `rank`: data-parallel."""

    def __init__(
        self, epoch: int, index: AnnouncedIndex, *, topic: bytes = b"", ring_batches: int = RING_BATCHES, rank: int = 0
    ) -> None:
        self.epoch = epoch
        self.index = index
        self._rank = rank
        self._topic = topic
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_batches)
        self._next_seq = 0

    @property
    def newest(self) -> int | None:
        """The last published number; None before the first batch."""
        return self._next_seq - 1 if self._next_seq else None

    @property
    def oldest(self) -> int | None:
        """The oldest number that can be replayed."""
        return self._ring[0][0] if self._ring else None

    def on_update(self, update: CacheUpdate, ts: float) -> Message | None:
        """A scheduler step → a live message; None if there is nothing to announce. `ts`: Unix seconds."""
        events = self.index.apply(update.events)
        if not events:
            return None
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload = encode_batch(ts, events, self._rank)
        self._ring.append((seq, payload))
        return frames.live(self._topic, seq, payload)

    def on_request(self, message: Message) -> Iterator[Message] | None:
        """Frames after the identity → the answer; None if the request gets none."""
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
                yield frames.encode_reply(frames.ReplayItem(self._topic, seq, payload))
        yield frames.encode_reply(frames.ReplayEnd())

    def _snapshot(self, tiers: dict[Medium, dict[int, Page]], seq: int) -> Iterator[Message]:
        announced = sum(page.announced for pages in tiers.values() for page in pages.values())
        yield frames.encode_reply(frames.SnapshotHeader(self.epoch, seq, announced))
        for medium, pages in tiers.items():
            ordered = parents_first(pages)
            while chunk := list(itertools.islice(ordered, SNAPSHOT_PAGES_A_CHUNK)):
                yield frames.encode_reply(frames.SnapshotChunk(list(runs(chunk, medium, names=self.index.names))))
        yield frames.encode_reply(frames.SnapshotEnd())


class LoadStream:
    """Latest load in, messages out: SGLang's `LoadStat` and ours. Times are monotonic seconds."""

    def __init__(self, epoch: int, page_size: int, rank: int = 0) -> None:
        self._epoch = epoch
        self._rank = rank
        self._load = LoadUpdate(page_size=page_size)
        self._busy_when_sent = False
        self._draining = False
        self._changed = True
        self._urgent = False
        self._sent_at = float("-inf")
        self._heard_at = float("inf")  # a scheduler that has not spoken yet is not missed
        self._seq = 0

    def on_load(self, load: LoadUpdate, now: float) -> None:
        """The scheduler's report, even if nothing changed.

        Becoming idle is urgent: until routers know, they may send the client's next request elsewhere.
        """
        self._heard_at = now
        self._changed = self._changed or load != self._load
        self._load = load
        self._urgent = self._urgent or (self._busy_when_sent and not _in_flight(load))

    def on_draining(self) -> None:
        """Marks the server as draining, for good. The next `take` sends it at once, regardless of the rate."""
        self._urgent = self._urgent or not self._draining
        self._draining = True

    def due_at(self) -> float:
        """The time when `take` will have messages."""
        if self._urgent:
            return float("-inf")
        due = self._sent_at + (MIN_INTERVAL_S if self._changed else HEARTBEAT_S)
        return due if due <= self._heard_at + STILL_AFTER_S else float("inf")

    def take(self, now: float) -> list[list[bytes]]:
        """Returns the messages to send now: none before `due_at`."""
        if now < self.due_at():
            return []
        seq, self._seq = self._seq, self._seq + 1
        self._sent_at, self._changed, self._urgent = now, False, False
        self._busy_when_sent = _in_flight(self._load) > 0
        return [
            frames.live(LOAD_TOPIC, seq, encode(self._load_stat())),
            frames.live(TREELINE_LOAD_TOPIC, seq, encode(self._treeline_load(seq))),
        ]

    def _load_stat(self) -> LoadStat:
        load = self._load
        return LoadStat(
            num_running=load.running,
            num_waiting=load.waiting,
            num_tokens=load.tokens_used,
            max_total_num_tokens=load.tokens_total,
            attn_dp_rank=self._rank,
            num_waiting_uncached_tokens=load.waiting_uncached_tokens,
            num_total_tokens=load.tokens_used + load.waiting_uncached_tokens,
            max_running_requests=load.max_running,
            total_prefill_uncached_tokens=load.total_prefill_uncached_tokens,
            total_prefill_busy_us=load.total_prefill_busy_us,
        )

    def _treeline_load(self, seq: int) -> TreelineLoad:
        load = msgspec.convert(self._load, TreelineLoad, from_attributes=True)
        return msgspec.structs.replace(
            load,
            epoch=self._epoch,
            seq=seq,
            draining=load.draining or self._draining or self._load.asleep > 0,
            in_flight=_in_flight(self._load),
            adapters=sorted(self._load.digests),
        )


def _in_flight(load: LoadUpdate) -> int:
    return load.running + load.waiting
