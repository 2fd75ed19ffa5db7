"""The states of a subscription, its events, the kinds of publishers, and its settings.

Theory of operation. Live batches are numbered. While all arrive in order the state is LIVE and each is applied at once.
Whenever something may be missing (a reconnect, a gap, silence, a heartbeat that names more, an audit that failed) the
subscription *recovers*: it leaves LIVE, buffers live batches, asks, applies the answer, then what it buffered, and is
LIVE again. `table` says for each state and event which method handles it and to which states it may lead.

    DISCONNECTED  a socket is missing; entries stay until the peer is known to be another process
    HELLO         asked for the epoch and for the batches that can be replayed. Another epoch: all entries are
                  dropped at once. Nothing missing: LIVE. Missing and covered: REPLAY. Else: SNAPSHOT. No answer from a
                  publisher that never answered: it is not one of ours ("foreign")
    REPLAY        fills a gap. A foreign publisher has no epoch, so after a reconnect the last known batch is replayed
                  first: if its time stamp differs, or it is missing, this is another process. An answer that breaks
                  off (full queues there drop messages, also the last) is requested again from that point on
    SNAPSHOT      asked for everything (only ours)
    CHUNKS        the snapshot arrives; it replaces all entries when it is complete
    BACKOFF       no answer, or too many questions: it is asked again later
    LIVE          all published batches have been applied
    CHECKING      LIVE, with an open hello that shows whether the last batch of a burst was lost: every second

Foreign publishers cannot always be completed. A gap that their replay does not cover, and a reconnect after which no
replay shows whether this is still the same process, leave their entries in doubt: they age (`Index.age`), `partial` is
set, and the audit of routed requests decides (`Pod.rebuild_wanted`).

Load reports of ours name the epoch, too (`on_heartbeat`), and may name the newest batch; while they do, no hello is
sent to ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from treeline_wire.frames import Hello, ReplayEnd, SnapshotChunk, SnapshotEnd, SnapshotHeader

from treeline_epp.kvevents.reading import Replayed


class SubscriptionState(StrEnum):
    """The state of a subscription; see the module. The values are metric labels."""

    DISCONNECTED = "disconnected"
    HELLO = "hello"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"
    CHUNKS = "chunks"
    BACKOFF = "backoff"
    LIVE = "live"
    CHECKING = "checking"


class SubscriptionEvent(StrEnum):
    """An event of a subscription."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    BATCH = "batch"
    HEARTBEAT = "heartbeat"
    TURN = "turn"
    """A turn to do a part of the waiting work."""
    TICK = "tick"
    TIMEOUT = "timeout"
    """A tick at or after the time until which the state lasts: an answer's deadline, the end of a pause."""
    HELLO = "hello"
    REPLAY_ITEM = "replay_item"
    REPLAY_END = "replay_end"
    SNAPSHOT_HEADER = "snapshot_header"
    SNAPSHOT_CHUNK = "snapshot_chunk"
    SNAPSHOT_END = "snapshot_end"


class Peer(Enum):
    """The kind of a publisher."""

    UNKNOWN = "unknown"
    OURS = "ours"
    """A Treeline runtime: it answers hello."""
    FOREIGN = "foreign"
    """Another engine (vLLM, SGLang): it does not answer hello, or its type is known and it is never asked."""


@dataclass(frozen=True, slots=True)
class SubscriptionConfig:
    """The settings of a subscription; times in seconds. `reply_s`: after this long no answer is expected any more.
    `check_s`: between hellos while LIVE. `grace_s`: longest time for a batch that an answer names to arrive.
    `silence_s`: silence of this length while requests run there is suspicious. `replay_retry_s`: least time before an
    unanswered replay is requested again, unless the publisher has just come (back): then `come_back_s`, since a
    starting engine is slow to answer. Retries wait `backoff_s`, doubled each time up to `max_backoff_s`. `buffer`
    bounds buffered batches, `buffer_bytes` their bytes.
    """

    reply_s: float = 1.0
    check_s: float = 1.0
    grace_s: float = 0.15
    silence_s: float = 10.0
    replay_retry_s: float = 30.0
    come_back_s: float = 5.0
    backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    buffer: int = 10_000
    buffer_bytes: int = 16 << 20


@dataclass(slots=True)
class Checks:
    """The checks while LIVE: when the next is due, how many were missed in a row, and the missing batch, since when."""

    due_at: float = 0.0
    missed: int = 0
    behind: tuple[int, float] | None = None


@dataclass(slots=True)
class Replay:
    """The requested replay. `start` is its first batch. `overlap`: the known batch with which it must begin. `beyond`:
    the first batch that waits for its end, if there is a gap before that. `uncovered`: it does not have the missing
    batches.
    """

    start: int | None = None
    overlap: int | None = None
    uncovered: bool = False
    beyond: int | None = None


EVENT_OF: Mapping[type, SubscriptionEvent] = {
    Hello: SubscriptionEvent.HELLO,
    Replayed: SubscriptionEvent.REPLAY_ITEM,
    ReplayEnd: SubscriptionEvent.REPLAY_END,
    SnapshotHeader: SubscriptionEvent.SNAPSHOT_HEADER,
    SnapshotChunk: SubscriptionEvent.SNAPSHOT_CHUNK,
    SnapshotEnd: SubscriptionEvent.SNAPSHOT_END,
}
