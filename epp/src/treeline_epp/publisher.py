"""A publisher's state machine: what to ask of a publisher so that the index equals its cache. Sans-IO.

Two rules. All questions to a publisher come from here, at most one is open at a time, and nobody else applies its
events. The driver owns the sockets: it feeds what arrives, performs the returned actions on the publisher's replay
socket (a DEALER; a fresh one after each reconnect, so that no answer to an old question can arrive), and ticks.

Theory of operation. Live batches are numbered. While all arrive in order the state is LIVE and each is applied at once.
Whenever something may be missing the machine leaves LIVE, buffers live batches, asks, applies the answer, then what it
buffered, and is LIVE again:

    NEW        not connected yet
    BOOTSTRAP  connected, no base yet: asking for one
    LIVE       all that was published has been applied
    SUSPECT    there is a base, and doubt: disconnected, reconnected, a gap, silence, or an audit that failed

What is asked:

    hello      on every (re)connection and doubt, and every second while LIVE, since the last batch of a burst may be
               lost without a trace. The answer names the epoch and the batches that can be replayed. Another epoch:
               everything known is dropped at once. Nothing missing: LIVE. Missing and covered: replay. Else:
               snapshot. No answer in a second from a publisher that never answered: it is not ours ("foreign").
    replay     fills a gap. A foreign publisher has no epoch, so after a reconnect the last batch that we know is
               replayed first: if its time stamp is another, or it is not there, this is another process.
    snapshot   replaces everything (only ours).

Foreign publishers cannot always be made whole. A gap that their replay does not cover leaves what they hold in doubt:
it ages (`Index.age`), `partial` is set, and the audit of routed requests has the last word (`resync`).

Load reports of ours name the epoch, too (`on_heartbeat`), and may name the newest batch; while they do, no hello is
sent to ask for it.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeAlias

from treeline_wire.events import DecodeError, EventBatch, decode_batch
from treeline_wire.frames import (
    Hello,
    ReplayEnd,
    ReplayItem,
    Reply,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
)
from treeline_wire.keys import PrefixKeys

from treeline_epp.index import Index, Pod


class State(StrEnum):
    """See the module."""

    NEW = "new"
    BOOTSTRAP = "bootstrap"
    LIVE = "live"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class SendHello:
    """Send `frames.hello_request()`."""


@dataclass(frozen=True, slots=True)
class SendReplay:
    """Send `frames.replay_request(start_seq)`."""

    start_seq: int


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send `frames.snapshot_request()`."""


Action: TypeAlias = SendHello | SendReplay | SendSnapshot


class _Question(Enum):
    """What is open."""

    NONE = "none"
    HELLO = "hello"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"  # no header yet
    CHUNKS = "chunks"


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Times in seconds. `reply_s`: no answer for so long means none will come. `check_s`: between hellos while LIVE.
    `grace_s`: a batch that an answer names may still be on its way so long. `silence_s`: so long without a word while
    requests run there is suspicious. Retries wait `backoff_s`, doubled each time up to `max_backoff_s`. `buffer` bounds
    buffered batches."""

    reply_s: float = 1.0
    check_s: float = 1.0
    grace_s: float = 0.15
    silence_s: float = 10.0
    backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    buffer: int = 10_000


#: Remembered time stamps, to tell a batch that came twice from one of a new process.
_REMEMBERED = 256
#: Questions in one recovery before it waits.
_MAX_ROUNDS = 4
#: Unanswered checks in a row that put a LIVE publisher in doubt. One may be late because it sends a snapshot.
_MAX_MISSED_CHECKS = 3


class Publisher:
    """One (pod UID, rank). Methods return the actions to perform now, in order.

    Readable: `state`, `epoch`, `next_seq` (the next batch wanted), `partial` (something is known to be missing),
    `ours` (None until it is known), `counts` (by event: "applied", "gaps", "snapshots" …).
    """

    def __init__(
        self, index: Index, pod: Pod, keys: PrefixKeys | None, config: PublisherConfig | None = None
    ) -> None:
        self.pod = pod
        self.state = State.NEW
        self.epoch: int | None = None
        self.next_seq: int | None = None
        self.partial = False
        self.ours: bool | None = None
        self.counts: Counter[str] = Counter()
        self._index = index
        self._keys = keys
        self._config = config or PublisherConfig()
        self._connected = False
        self._question = _Question.NONE
        self._deadline = 0.0
        self._retry_at: float | None = None
        self._backoff = self._config.backoff_s
        self._rounds = 0
        self._buffer: deque[tuple[int, EventBatch | None]] = deque()
        self._recent: dict[int, float] = {}
        self._snapshot_seq = 0
        self._want_snapshot = False
        self._replays: bool | None = None
        self._probe: int | None = None
        self._uncovered = False
        self._last_heard = 0.0
        self._behind: tuple[int, float] | None = None
        self._check_at = 0.0
        self._missed_checks = 0

    # What the driver feeds

    def on_connected(self, now: float) -> list[Action]:
        """Both sockets are connected (again)."""
        self._connected = True
        self._last_heard = now
        return self._doubt(now)

    def on_disconnected(self, now: float) -> None:
        """A socket lost its peer. What is known stays until the peer is known to be another process."""
        del now
        self._connected = False
        self._close_question()
        self._retry_at = None
        self._rounds = 0
        self._backoff = self._config.backoff_s
        self._behind = None
        self._buffer.clear()
        self.state = State.NEW if self.next_seq is None else State.SUSPECT

    def on_live(self, seq: int, batch: EventBatch | None, now: float) -> list[Action]:
        """A live batch; None if its payload could not be decoded."""
        self._last_heard = now
        if self.state is State.LIVE:
            return self._take(seq, batch, now)
        if len(self._buffer) >= self._config.buffer:
            self._buffer.popleft()  # leaves a gap, which will be seen
            self.counts["overflows"] += 1
        self._buffer.append((seq, batch))
        return []

    def on_reply(self, reply: Reply, now: float) -> list[Action]:
        """Anything that arrived on the replay socket. Answers to no open question are ignored."""
        self._last_heard = now
        match reply, self._question:
            case Hello(), _Question.HELLO if self.state is State.LIVE:
                self._question = _Question.NONE
                self._missed_checks = 0
                actions = self.on_heartbeat(reply.epoch, -1 if reply.newest is None else reply.newest, now)
                self._check_at = now + self._config.check_s
                return actions
            case Hello(), _Question.HELLO:
                return self._on_hello(reply, now)
            case Hello(), _ if not self.ours:
                self.ours = True  # it was slow, but it is ours
                return self._doubt(now) if self.state is State.LIVE else []
            case ReplayItem(), _Question.REPLAY:
                self._deadline = now + self._config.reply_s
                self._on_replay_item(reply, now)
            case ReplayEnd(), _Question.REPLAY:
                return self._on_replay_end(now)
            case SnapshotHeader(), _Question.SNAPSHOT | _Question.CHUNKS:
                self._on_snapshot_header(reply, now)
            case SnapshotChunk(), _Question.CHUNKS:
                self._deadline = now + self._config.reply_s
                self.counts["rejected"] += reply.rejected
                self._index.apply_snapshot(self.pod, reply.events, self._keys)
            case SnapshotEnd(), _Question.CHUNKS:
                return self._on_snapshot_end(now)
            case _:
                self.counts["unasked"] += 1
        return []

    def on_heartbeat(self, epoch: int, newest: int | None, now: float) -> list[Action]:
        """A load report named the publisher's epoch and (unless None) its newest batch, -1 for none."""
        self._last_heard = now
        if not self._connected or self.state is not State.LIVE:
            return []
        if self.ours is False:
            self.ours = None  # foreign publishers send no such report: it must have been slow to answer
            return self._doubt(now)
        if epoch != self.epoch:
            self._drop()
            return self._doubt(now)
        if newest is None:
            return []
        self._check_at = (
            now + 1.25 * self._config.check_s
        )  # a heartbeat is a check; the next should come sooner
        if self.next_seq is not None and newest < self.next_seq:
            self._behind = None
        elif self._behind is None:
            self._behind = (newest, now)
        return []

    def on_tick(self, now: float, in_flight: int = 0) -> list[Action]:
        """Time passed; call at least every 100 ms. `in_flight`: requests that we know to be running there."""
        if not self._connected:
            return []
        if self._question is not _Question.NONE and now >= self._deadline:
            return self._on_timeout(now)
        if self.state is not State.LIVE:
            return self._doubt(now) if self._retry_at is not None and now >= self._retry_at else []
        if self._want_snapshot:
            if self.ours is False:
                self._want_snapshot = False
                self._drop()
            return self._doubt(now)
        if self._behind is not None and now - self._behind[1] >= self._config.grace_s:
            self.counts["behind"] += 1
            return self._doubt(now)
        if self.ours and now >= self._check_at and self._question is _Question.NONE:
            self._rounds = 0
            return self._ask(_Question.HELLO, SendHello(), now)
        if in_flight and now - self._last_heard >= self._config.silence_s:
            self._last_heard = now
            self.counts["silences"] += 1
            return self._doubt(now)
        return []

    def resync(self) -> None:
        """What the index says of this pod was found wrong: build it anew, as well as the publisher allows, from the
        next tick on."""
        self.counts["resyncs"] += 1
        self._want_snapshot = True

    # Asking

    def _doubt(self, now: float) -> list[Action]:
        """Find out what is missing."""
        self.state = State.BOOTSTRAP if self.next_seq is None else State.SUSPECT
        self._retry_at = None
        self._behind = None
        self._close_question()
        if self.ours is not False:
            return self._ask(_Question.HELLO, SendHello(), now)
        return self._ask_foreign(now)

    def _ask_foreign(self, now: float) -> list[Action]:
        """Replay all, or from the last batch that is known."""
        if self._replays is False:
            self.partial = True
            return self._finish(now)
        self._probe = None
        if self.next_seq is None:
            return self._ask(_Question.REPLAY, SendReplay(0), now)
        self._probe = self.next_seq - 1
        return self._ask(_Question.REPLAY, SendReplay(max(0, self._probe)), now)

    def _ask(self, question: _Question, action: Action, now: float) -> list[Action]:
        self._rounds += 1
        if self._rounds > _MAX_ROUNDS:
            return self._wait(now)
        self._question = question
        self._deadline = now + self._config.reply_s
        self._uncovered = False
        self.counts[question.value] += 1
        return [action]

    def _wait(self, now: float) -> list[Action]:
        """Try again later."""
        self._close_question()
        self._rounds = 0
        self._retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, self._config.max_backoff_s)
        return []

    def _close_question(self) -> None:
        self._question = _Question.NONE
        self._index.drop_snapshot(self.pod)

    def _on_timeout(self, now: float) -> list[Action]:
        question = self._question
        self.counts["timeouts"] += 1
        self._close_question()
        if self.state is State.LIVE:  # a check
            self._missed_checks += 1
            return self._doubt(now) if self._missed_checks >= _MAX_MISSED_CHECKS else []
        if self.ours:
            return self._wait(now)
        if question is _Question.HELLO:
            self.ours = False
            return self._ask_foreign(now)
        self._replays = False  # not configured there, or too old
        self.partial = True
        return self._finish(now)

    # Answers

    def _on_hello(self, hello: Hello, now: float) -> list[Action]:
        self.ours = True
        self._question = _Question.NONE
        if self.epoch != hello.epoch:
            if self.next_seq is not None:
                self._drop()
            self.epoch = hello.epoch
            self.state = State.BOOTSTRAP
        newest = -1 if hello.newest is None else hello.newest
        if self.next_seq is not None and newest < self.next_seq - 1:
            self._drop()  # it does not know batches that we have: not the same process, whatever it says
            self.epoch = hello.epoch
        if self._want_snapshot:
            return self._ask(_Question.SNAPSHOT, SendSnapshot(), now)
        if self.next_seq is None:
            if newest >= 0:
                return self._ask(_Question.SNAPSHOT, SendSnapshot(), now)
            self.next_seq = 0
        if newest == self.next_seq - 1:
            return self._finish(now)
        return self._fill(hello.oldest, now)

    def _fill(self, oldest: int | None, now: float) -> list[Action]:
        """Batches from `next_seq` on are missing; `oldest` is the first that can be replayed, None if unknown."""
        assert self.next_seq is not None
        if self.ours and (oldest is not None and oldest > self.next_seq):
            return self._ask(_Question.SNAPSHOT, SendSnapshot(), now)
        self._probe = None
        return self._ask(_Question.REPLAY, SendReplay(self.next_seq), now)

    def _on_replay_item(self, item: ReplayItem, now: float) -> None:
        try:
            batch = decode_batch(item.payload)
        except DecodeError:
            batch = None
        if self._probe is not None:
            known = self._recent.get(self._probe)
            same = item.seq == self._probe and batch is not None and known in (None, batch.ts)
            if not same and item.seq <= self._probe:
                self._drop()
                self._uncovered = True  # ask again, from 0, when this replay is over
            self._probe = None
        if self._uncovered:
            return
        if self.next_seq is None:
            self.partial = item.seq > 0
            self.next_seq = item.seq
        if item.seq > self.next_seq:
            self.counts["uncovered"] += 1
            if self.ours:
                self._uncovered = True
                return
            self._accept_gap(item.seq, now)
        if item.seq == self.next_seq:
            self._apply(item.seq, batch)

    def _on_replay_end(self, now: float) -> list[Action]:
        self._question = _Question.NONE
        self._replays = True
        if self._probe is not None and self._probe >= 0:
            self._drop()  # it has never published what we know: another process
            self._probe = None
            return self._doubt(now)
        if self._uncovered and self.ours:
            return self._ask(_Question.SNAPSHOT, SendSnapshot(), now)
        if self._uncovered:
            return self._doubt(now)
        if self.ours and self.next_seq is None:
            return self._doubt(now)
        return self._finish(now)

    def _on_snapshot_header(self, header: SnapshotHeader, now: float) -> None:
        if header.epoch != self.epoch:
            self._drop()
            self.epoch = header.epoch
        self._index.begin_snapshot(self.pod)
        self._snapshot_seq = header.seq
        self._question = _Question.CHUNKS
        self._deadline = now + self._config.reply_s

    def _on_snapshot_end(self, now: float) -> list[Action]:
        self._question = _Question.NONE
        self._index.end_snapshot(self.pod)
        self.next_seq = self._snapshot_seq + 1
        self.partial = False
        self._want_snapshot = False
        self._recent.clear()
        return self._finish(now)

    # Batches

    def _finish(self, now: float) -> list[Action]:
        """The answer is applied: apply what came meanwhile; LIVE, unless that has a gap, too."""
        self._question = _Question.NONE
        self.state = State.LIVE
        buffered, self._buffer = self._buffer, deque()
        newest = -1
        while buffered:
            seq, batch = buffered.popleft()
            if seq < newest and not self._came_before(seq, batch):  # it restarted meanwhile
                buffered.appendleft((seq, batch))
                self._drop()
                actions = self._doubt(now)
                self._buffer = buffered
                return actions
            newest = max(newest, seq)
            if self.next_seq is not None and seq < self.next_seq:
                continue  # the answer covered it
            actions = self._take(seq, batch, now)
            if self.state is not State.LIVE:
                self._buffer.extend(buffered)
                return actions
        self._rounds = 0
        self._backoff = self._config.backoff_s
        self._check_at = now + self._config.check_s
        return []

    def _take(self, seq: int, batch: EventBatch | None, now: float) -> list[Action]:
        """A live batch while LIVE."""
        if self.next_seq is None:
            self.next_seq = seq  # a foreign publisher without replay: begin where it is
        if seq < self.next_seq:
            if self._came_before(seq, batch):
                self.counts["duplicates"] += 1
                return []
            self._drop()
            self._buffer.append((seq, batch))
            return self._doubt(now)
        if seq > self.next_seq:
            self.counts["gaps"] += 1
            if self.ours is False and self._replays is False:
                self._accept_gap(seq, now)
            else:
                self._buffer.append((seq, batch))
                self.state = State.SUSPECT
                return self._fill(None, now)
        self._apply(seq, batch)
        return []

    def _apply(self, seq: int, batch: EventBatch | None) -> None:
        """The next batch."""
        self.next_seq = seq + 1
        if self._behind is not None and seq >= self._behind[0]:
            self._behind = None
        self._recent.pop(seq - _REMEMBERED, None)
        if batch is None:
            self.counts["undecodable"] += 1
            self.partial = True
            return
        self._recent[seq] = batch.ts
        self.counts["applied"] += 1
        if batch.rejected:
            self.counts["rejected"] += sum(batch.rejected.values())
            self.partial = True
        apply: Callable[..., None] = self._index.apply
        for event in batch.events:
            apply(self.pod, event, self._keys)

    def _came_before(self, seq: int, batch: EventBatch | None) -> bool:
        """Is this a second copy of a batch that was applied?"""
        return batch is not None and self._recent.get(seq) == batch.ts

    def _accept_gap(self, seq: int, now: float) -> None:
        """Batches before `seq` are lost for good: go on from there, and let what is known grow old."""
        self.counts["lost"] += 1
        self.partial = True
        self.next_seq = seq
        self._index.age(self.pod, now)

    def _drop(self) -> None:
        """Another process, another cache: forget everything at once."""
        self.counts["epochs"] += 1
        self._index.clear(self.pod)
        self.epoch = None
        self.next_seq = None
        self.partial = False
        self._recent.clear()
        self._behind = None
        self._missed_checks = 0
