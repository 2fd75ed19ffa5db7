"""Load reports: when to say what. On change at most 20 times a second, else once a second; at once when the last
request ends and when the engine drains. No sockets, no clock.

They speak for the scheduler: when it says nothing any more, they end, and a router sees that the engine hangs.
"""

from __future__ import annotations

import msgspec
from treeline_wire import frames
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad, encode

from treeline_runtime.messages import LoadUpdate

MIN_INTERVAL_S = 0.05
HEARTBEAT_S = 1.0
STILL_AFTER_S = 3.0
"""Reports end when the scheduler has said nothing for so long. It does so every half second, between two steps."""


class LoadStream:
    """Latest load in, messages out: SGLang's `LoadStat` and ours, one after the other. Times are monotonic seconds."""

    def __init__(self, epoch: int, page_size: int) -> None:
        self._epoch = epoch
        self._load = LoadUpdate(page_size=page_size)
        self._busy_when_sent = False
        self._draining = False
        self._changed = True
        self._urgent = False
        self._sent_at = float("-inf")
        self._heard_at = float("inf")  # a scheduler that has not spoken yet is not missed
        self._seq = 0

    def on_load(self, load: LoadUpdate, now: float) -> None:
        """The scheduler's word, if only that nothing has changed.

        That it has become idle is urgent: until a router knows it, the next request of the same client may be sent
        where its prefix is not.
        """
        self._heard_at = now
        self._changed = self._changed or load != self._load
        self._load = load
        self._urgent = self._urgent or (self._busy_when_sent and not _in_flight(load))

    def on_draining(self) -> None:
        """Sticky, and sent with the next `take` whatever the rate: a router must learn of it at once."""
        self._urgent = self._urgent or not self._draining
        self._draining = True

    def due_at(self) -> float:
        """When `take` has something to send."""
        if self._urgent:
            return float("-inf")
        due = self._sent_at + (MIN_INTERVAL_S if self._changed else HEARTBEAT_S)
        return due if due <= self._heard_at + STILL_AFTER_S else float("inf")

    def take(self, now: float) -> list[list[bytes]]:
        """The messages to send now: none before `due_at`."""
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
            attn_dp_rank=0,
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
        )


def _in_flight(load: LoadUpdate) -> int:
    return load.running + load.waiting
