"""The states of a subscription, all that can happen to it, what it may ask, and its settings.

Theory of operation. Live batches are numbered. While all arrive in order the state is LIVE and each is applied at once.
Whenever something may be missing (a reconnect, a gap, silence, a heartbeat that names more, an audit that failed) the
subscription *recovers*: it leaves LIVE, buffers live batches, asks, applies the answer, then what it buffered, and is
LIVE again. `table` says for each state and event which method handles it and to which states it may lead.

    DISCONNECTED  a socket is missing; what is known stays until the peer is known to be another process
    HELLO         asked which epoch this is and which batches can be replayed. Another epoch: everything known is
                  dropped at once. Nothing missing: LIVE. Missing and covered: REPLAY. Else: SNAPSHOT. No answer from a
                  publisher that never answered: it is not one of ours ("foreign")
    REPLAY        fills a gap. A foreign publisher has no epoch, so after a reconnect the last batch that we know is
                  replayed first: if its time stamp is another, or it is not there, this is another process. An answer
                  that breaks off (their queues drop what has no room, the end too) is asked for from where it broke off
    SNAPSHOT      asked for everything (only ours)
    CHUNKS        the snapshot arrives; it takes the place of what is known when it is complete
    BACKOFF       no answer, or too many questions: it is asked again later
    LIVE          all that was published has been applied
    CHECKING      LIVE, and asked by hello whether the last batch of a burst was lost without a trace: every second

Foreign publishers cannot always be made whole. A gap that their replay does not cover, and a reconnect after which no
replay tells whether this is still the same process, leave what they hold in doubt: it ages (`Index.age`), `partial` is
set, and the audit of routed requests has the last word (`Pod.rebuild_wanted`).

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
    """See the module. The values are metric labels."""

    DISCONNECTED = "disconnected"
    HELLO = "hello"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"
    CHUNKS = "chunks"
    BACKOFF = "backoff"
    LIVE = "live"
    CHECKING = "checking"


class SubscriptionEvent(StrEnum):
    """All that can happen to a subscription."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    BATCH = "batch"
    HEARTBEAT = "heartbeat"
    TURN = "turn"
    """There is time for a part of the work that waits."""
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
    """What kind of publisher it is."""

    UNKNOWN = "unknown"
    OURS = "ours"
    """It answers hello: a Treeline runtime."""
    FOREIGN = "foreign"
    """It does not, or is known to be another and never asked: vLLM, SGLang."""


@dataclass(frozen=True, slots=True)
class SubscriptionConfig:
    """Times in seconds. `reply_s`: no answer for so long means none will come. `check_s`: between hellos while LIVE.
    `grace_s`: a batch that an answer names may still be on its way so long. `silence_s`: so long without a word while
    requests run there is suspicious. `replay_retry_s`: a replay that was not answered is asked for again no sooner,
    unless the publisher has just come (back): then after `come_back_s`, since an engine that starts is slow to answer.
    Retries wait `backoff_s`, doubled each time up to `max_backoff_s`. `buffer` bounds buffered batches,
    `buffer_bytes` what is in them."""

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
    """While LIVE: when to ask next, how often that was in vain, and the batch that is missing (since when), if any."""

    due_at: float = 0.0
    missed: int = 0
    behind: tuple[int, float] | None = None


@dataclass(slots=True)
class Replay:
    """The replay that is asked for. `start` is the first batch of it. `overlap`: it must begin with this batch, which
    we know. `beyond`: the first batch that waits for it to be complete, where there is a gap before that. `uncovered`:
    it does not give what is missing."""

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
