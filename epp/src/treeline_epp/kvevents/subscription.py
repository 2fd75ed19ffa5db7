"""A subscription to one engine's KV events: it asks the publisher until the index equals the engine's cache. Sans-IO.

Two rules. All questions to a publisher come from here, at most one at a time, and only this code applies its events.
The driver (`connection`) owns the sockets: it feeds what arrives, sends the requests that are returned on the
publisher's replay socket (a DEALER; a fresh one after each reconnect, so that no answer to an old question can arrive),
and ticks. Input may leave work: while this is `busy`, the driver gives it turns of a millisecond each, and feeds
nothing. `TABLE` (see `table`) has the method for each event in each state; `states` explains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from treeline_wire import frames
from treeline_wire.events import EventBatch
from treeline_wire.frames import Request
from treeline_wire.keys import PrefixKeys

from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod
from treeline_epp.kvevents.batches import AppliedBatches, WaitingBatches
from treeline_epp.kvevents.reading import Answer, Replayed
from treeline_epp.kvevents.states import (
    EVENT_OF,
    Checks,
    Peer,
    Replay,
    SubscriptionConfig,
    SubscriptionEvent,
    SubscriptionState,
)
from treeline_epp.kvevents.table import table_of

_DRAINED = 64  # most waiting batches that are taken in one turn
_MAX_ROUNDS = 4  # most questions in one recovery before it waits
_MAX_ASKS = 12  # most replays asked of a publisher without an epoch after it has come (back), until it answers
_MAX_MISSED_CHECKS = 3  # in a row, until a LIVE subscription recovers; one may be late because of a snapshot


class KvSubscription:
    """The subscription of one (pod UID, rank). Methods return the requests to send now, in order. `ours`: the publisher
    may be one of ours; others, to which a hello is an invalid request, never get one. `replays`: there is a socket for
    questions. `stretch` (≥ 1), for many publishers: checks while LIVE are this much rarer than configured, and answers
    may take this much longer.

    Readable: `state`, `epoch`, `peer`, `applied`, `counts` (by event: "applied", "gaps", "snapshot" …).
    """

    def __init__(
        self,
        index: Index,
        pod: Pod,
        keys: PrefixKeys | None,
        config: SubscriptionConfig | None = None,
        *,
        ours: bool = True,
        replays: bool = True,
        stretch: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.pod = pod
        self.state = SubscriptionState.DISCONNECTED
        self.epoch: int | None = None
        self.peer = Peer.UNKNOWN if ours else Peer.FOREIGN
        self.counts: Counter[str] = Counter()
        self._ours = ours
        self._index = index
        self._config = config or SubscriptionConfig()
        self._stretch = stretch
        self._until = float("inf")  # when the state times out
        self._rounds = 0
        self._backoff_s = self._config.backoff_s
        self._buffer = self._new_buffer()
        self._drained: int | None = None  # while LIVE with waiting batches: the newest that has been taken
        self.applied = AppliedBatches(index, pod, keys, self.counts)
        self._replay = Replay()
        self._no_replay_until = float("-inf") if replays else float("inf")
        self._verified = True  # whether the process is the one whose batches were applied
        self._asks_left = 0  # replays to ask for until one is answered
        self._snapshot_seq = 0
        self._checks = Checks()
        self._last_heard = 0.0
        self._in_flight = 0

    @property
    def live(self) -> bool:
        """Whether all batches known to be published have arrived."""
        return self.state is _LIVE or self.state is _CHECKING

    @property
    def busy(self) -> bool:
        """Whether work waits for a turn."""
        return self.applied.busy or self._drained is not None

    @property
    def next_seq(self) -> int | None:
        """The next batch wanted."""
        return self.applied.next_seq

    # Input from the driver

    def on_connected(self, now: float) -> list[Request]:
        """Handle a (re)connect of both sockets."""
        self._last_heard = now
        return self._handle(SubscriptionEvent.CONNECTED, None, now)

    def on_disconnected(self, now: float) -> None:
        """Handle the loss of a socket's peer."""
        self.counts["disconnects"] += 1
        self._handle(SubscriptionEvent.DISCONNECTED, None, now)

    def on_live(self, seq: int, batch: EventBatch | None, now: float) -> list[Request]:
        """Take a live batch; None if its payload could not be decoded."""
        self._last_heard = now
        return self._handle(SubscriptionEvent.BATCH, (seq, batch), now)

    def on_reply(self, reply: Answer, now: float) -> list[Request]:
        """Take a message of the replay socket. Answers to no open question are ignored."""
        self._last_heard = now
        return self._handle(EVENT_OF[type(reply)], reply, now)

    def on_turn(self, now: float) -> list[Request]:
        """Do a part of the waiting work."""
        return self._handle(SubscriptionEvent.TURN, None, now)

    def on_heartbeat(self, epoch: int, newest: int | None, now: float) -> list[Request]:
        """Take a load report's epoch and newest batch: -1 for none, None if not named."""
        self._last_heard = now
        return self._handle(SubscriptionEvent.HEARTBEAT, (epoch, newest), now)

    def on_tick(self, now: float, in_flight: int = 0) -> list[Request]:
        """Handle the passing of time; call at least every 100 ms. `in_flight`: requests known to be running there."""
        self._in_flight = in_flight
        self.applied.tick(now)
        event = SubscriptionEvent.TIMEOUT if now >= self._until else SubscriptionEvent.TICK
        return self._handle(event, None, now)

    def _handle(self, event: SubscriptionEvent, what: Any, now: float) -> list[Request]:
        cell = TABLE[self.state][event]
        sends = cell.handle(self, what, now)
        assert self.state in cell.leads_to, (event, self.state)
        self.applied.work()
        return sends

    # In any state

    def _ignore(self, _what: Any, _now: float) -> list[Request]:
        return []

    def _unasked(self, _what: Any, _now: float) -> list[Request]:
        self.counts["unasked"] += 1
        return []

    def _disconnected(self, _what: Any, _now: float) -> list[Request]:
        self._enter(_DISCONNECTED)
        self._rounds = 0
        self._backoff_s = self._config.backoff_s
        self._checks.behind = None
        self._buffer.clear()
        return []

    def _connected(self, what: Any, now: float) -> list[Request]:
        self._verified = self.next_seq is None or self.peer is Peer.OURS  # ours are asked by hello
        self._asks_left = 0 if self.peer is Peer.OURS else _MAX_ASKS
        if self._no_replay_until < float("inf"):
            self._no_replay_until = now
        return self._recover(what, now)

    def _recover(self, _what: Any, now: float) -> list[Request]:
        """Find out which batches are missing."""
        self._checks.behind = None
        if self.peer is Peer.FOREIGN:
            return self._ask_foreign(now)
        return self._ask(_HELLO, frames.HelloRequest(), now)

    def _enter(self, state: SubscriptionState, until: float = float("inf")) -> None:
        if self.state is _CHUNKS and state is not _CHUNKS:
            self._index.drop_snapshot(self.pod)  # no effect on a complete one
        self.state = state
        self._until = until
        self._drained = None

    # Asking

    def _ask(self, state: SubscriptionState, request: Request, now: float) -> list[Request]:
        self._rounds += 1
        if self._rounds > _MAX_ROUNDS:
            return self._wait(now)
        self._enter(state, now + self._reply_s())
        self.counts[_HELLO.value if state is _CHECKING else state.value] += 1
        return [request]

    def _ask_replay(self, start: int, overlap: int | None, now: float) -> list[Request]:
        first = self._buffer.first if self._buffer else -1
        self._replay = Replay(start, overlap, beyond=first if first > start else None)
        return self._ask(_REPLAY, frames.ReplayRequest(start), now)

    def _ask_foreign(self, now: float) -> list[Request]:
        """Ask for a replay of all, or from the last known batch on."""
        if now < self._no_replay_until:
            return self._without_replay(now)
        if self.next_seq is None:
            return self._ask_replay(0, None, now)
        known = self.next_seq - 1
        return self._ask_replay(max(0, known), known, now)

    def _without_replay(self, now: float) -> list[Request]:
        """Go on with live batches, without a replay."""
        self.applied.partial = True
        if not self._verified:
            self._verified = True
            self.applied.accept_unverified(now)
        return self._finish(now)

    def _fill(self, oldest: int | None, now: float) -> list[Request]:
        """Ask for the batches from `next_seq` on; `oldest` is the first that can be replayed, None if unknown."""
        assert self.next_seq is not None
        if self.peer is Peer.OURS and oldest is not None and oldest > self.next_seq:
            return self._ask(_SNAPSHOT, frames.SnapshotRequest(), now)
        return self._ask_replay(self.next_seq, None, now)

    def _wait(self, now: float) -> list[Request]:
        """Try again later."""
        self._rounds = 0
        self._enter(_BACKOFF, now + self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, self._config.max_backoff_s)
        return []

    def _reply_s(self) -> float:
        """Return the longest wait for an answer. When thousands are asked at once, answers queue up: less patience
        would ask them all again.
        """
        return self._config.reply_s * self._stretch()

    def _check_s(self) -> float:
        return self._config.check_s * self._stretch()

    # No answer

    def _no_hello(self, _what: Any, now: float) -> list[Request]:
        self.counts["timeouts"] += 1
        if self.peer is Peer.OURS:
            return self._wait(now)
        self.peer = Peer.FOREIGN
        return self._ask_foreign(now)

    def _no_answer(self, what: Any, now: float) -> list[Request]:
        self.counts["timeouts"] += 1
        if self.peer is Peer.OURS:
            return self._wait(now)
        if self._replay.uncovered:  # it answered, as another process
            return self._recover(what, now)
        start, next_seq = self._replay.start, self.next_seq
        if start is not None and next_seq is not None and next_seq > start and self._replay.overlap is None:
            if self._buffer and self._buffer.first <= next_seq:
                return self._finish(now)  # only its end is missing
            self._rounds = 0
            return self._ask_replay(next_seq, None, now)
        self._no_replay_until = now + (self._config.come_back_s if self._asks_left else self._config.replay_retry_s)
        return self._without_replay(now)

    def _missed_check(self, what: Any, now: float) -> list[Request]:
        self.counts["timeouts"] += 1
        self._enter(_LIVE)
        self._checks.missed += 1
        return self._recover(what, now) if self._checks.missed >= _MAX_MISSED_CHECKS else []

    # Answers

    def _hello(self, hello: frames.Hello, now: float) -> list[Request]:
        self.peer = Peer.OURS
        if self.epoch != hello.epoch:
            if self.next_seq is not None:
                self._drop()
            self.epoch = hello.epoch
        newest, applied = -1 if hello.newest is None else hello.newest, self.applied
        if applied.next_seq is not None and newest < applied.next_seq - 1:
            self._drop()  # it does not have batches that we know: another process, whatever epoch it names
            self.epoch = hello.epoch
        if self.pod.rebuild_wanted:
            return self._ask(_SNAPSHOT, frames.SnapshotRequest(), now)
        if applied.next_seq is None:
            if newest >= 0:
                return self._ask(_SNAPSHOT, frames.SnapshotRequest(), now)
            applied.next_seq = 0
        if newest == applied.next_seq - 1:
            return self._finish(now)
        return self._fill(hello.oldest, now)

    def _checked(self, hello: frames.Hello, now: float) -> list[Request]:
        self._enter(_LIVE)
        self._checks.missed = 0
        sends = self._heartbeat((hello.epoch, -1 if hello.newest is None else hello.newest), now)
        self._checks.due_at = now + self._check_s()
        return sends

    def _late_hello(self, hello: frames.Hello, now: float) -> list[Request]:
        """Take an answer that came too late; it still shows that the publisher is one of ours."""
        if self.peer is Peer.OURS or not self._ours:
            return self._unasked(hello, now)
        self.peer = Peer.OURS
        return self._recover(hello, now) if self.live else []

    def _replay_item(self, item: Replayed, now: float) -> list[Request]:
        self._until = now + self._reply_s()
        seq, batch = item
        replay, applied = self._replay, self.applied
        if replay.overlap is not None:
            self._compare(seq, batch, replay.overlap, now)
            replay.overlap = None
        if replay.uncovered:
            return []
        if applied.next_seq is None:
            applied.partial = seq > 0
            applied.next_seq = seq
        if seq > applied.next_seq:
            self.counts["uncovered"] += 1
            if self.peer is Peer.OURS:
                replay.uncovered = True
                return []
            applied.accept_gap(seq, now)
        if seq == applied.next_seq:
            self._apply(seq, batch)
        return []

    def _compare(self, seq: int, batch: EventBatch | None, known: int, now: float) -> None:
        """Compare the first batch of a replay that should begin with `known`: is it the same process?"""
        if seq <= known and (seq != known or self.applied.contradicts(seq, batch)):
            self._drop()
            self._replay.uncovered = True  # ask again, from 0, when this replay is over
        elif not self._verified and not self.applied.has(seq, batch):
            self.applied.accept_gap(max(seq, known + 1), now)  # it no longer has that batch, so this stays unknown
        self._verified = True

    def _replay_end(self, end: frames.ReplayEnd, now: float) -> list[Request]:
        replay = self._replay
        self._asks_left = 0
        if replay.overlap is not None and replay.overlap >= 0:
            self._drop()  # it has never published the batches that we know: another process
            return self._recover(end, now)
        if replay.uncovered and self.peer is Peer.OURS:
            return self._ask(_SNAPSHOT, frames.SnapshotRequest(), now)
        if replay.uncovered or (self.peer is Peer.OURS and self.next_seq is None):
            return self._recover(end, now)
        if self.next_seq is None:
            self.applied.next_seq = 0  # it has published nothing yet: 0 is the next batch
        elif self.peer is Peer.FOREIGN and replay.beyond is not None and replay.start == self.next_seq:
            self.applied.accept_gap(replay.beyond, now)  # it cannot fill the gap
        return self._finish(now)

    def _snapshot_header(self, header: frames.SnapshotHeader, now: float) -> list[Request]:
        if header.epoch != self.epoch:
            self._drop()
            self.epoch = header.epoch
        self._index.begin_snapshot(self.pod)
        self._snapshot_seq = header.seq
        self._enter(_CHUNKS, now + self._reply_s())
        return []

    def _snapshot_chunk(self, chunk: frames.SnapshotChunk, now: float) -> list[Request]:
        self._until = now + self._reply_s()
        self.counts["rejected"] += chunk.rejected
        self.applied.stage(chunk.events)
        return []

    def _snapshot_end(self, _end: frames.SnapshotEnd, now: float) -> list[Request]:
        self.applied.begin_after(self._snapshot_seq)
        self.pod.rebuild_wanted = False
        return self._finish(now)

    # While LIVE

    def _heartbeat(self, named: tuple[int, int | None], now: float) -> list[Request]:
        epoch, newest = named
        if not self._ours:
            return []
        if self.peer is Peer.FOREIGN:
            self.peer = Peer.UNKNOWN  # foreign publishers send no such report: it was only slow to answer
            return self._recover(named, now)
        if epoch != self.epoch:
            self._drop()
            return self._recover(named, now)
        if newest is None:
            return []
        checks = self._checks
        checks.due_at = now + 1.25 * self._check_s()  # a heartbeat is a check; the next should come sooner
        if self.next_seq is not None and newest < self.next_seq:
            checks.behind = None
        elif checks.behind is None:
            checks.behind = (newest, now)
        return []

    def _live_tick(self, what: Any, now: float) -> list[Request]:
        behind = self._checks.behind
        if self.pod.rebuild_wanted:
            self.counts["rebuilds"] += 1
            if self.peer is Peer.FOREIGN:
                self.pod.rebuild_wanted = False
                self._drop()
            return self._recover(what, now)
        if behind is not None and now - behind[1] >= self._config.grace_s:
            self.counts["behind"] += 1
            return self._recover(what, now)
        if self.peer is Peer.OURS and now >= self._checks.due_at and self.state is _LIVE:
            self._rounds = 0
            return self._ask(_CHECKING, frames.HelloRequest(), now)
        if self._asks_left and self.peer is Peer.FOREIGN and now >= self._no_replay_until:
            self._asks_left -= 1
            self._rounds = 0
            return self._ask_foreign(now)
        if self._in_flight and now - self._last_heard >= self._config.silence_s:
            self._last_heard = now
            self.counts["silences"] += 1
            return self._recover(what, now)
        return []

    def _finish(self, now: float) -> list[Request]:
        """End a recovery: apply the batches that came meanwhile; LIVE, unless they have a gap, too."""
        self._enter(_LIVE)
        self._drained = -1
        return self._drain(None, now)

    def _drain(self, _what: Any, now: float) -> list[Request]:
        """Apply some of the batches that came meanwhile."""
        newest = self._drained
        if newest is None:
            return []
        buffered, self._buffer = self._buffer, self._new_buffer()
        for _ in range(min(_DRAINED, len(buffered))):
            seq, batch = buffered.popleft()
            later, newest = seq >= newest, max(newest, seq)
            if later and self.next_seq is not None and seq < self.next_seq:
                continue  # the answer had it
            sends = self._take((seq, batch), now)
            if not self.live:
                while buffered:
                    self._buffer.append(buffered.popleft())
                return sends
        self._buffer = buffered
        self._drained = newest if buffered else None
        if buffered:
            return []
        self._rounds = 0
        self._backoff_s = self._config.backoff_s
        self._checks.due_at = now + self._check_s()
        return []

    # Batches

    def _keep(self, came: tuple[int, EventBatch | None], _now: float) -> list[Request]:
        """Keep a live batch that must wait."""
        self.counts["overflows"] += self._buffer.append(came)
        return []

    def _take(self, came: tuple[int, EventBatch | None], now: float) -> list[Request]:
        """Take a live batch while LIVE."""
        seq, batch = came
        applied = self.applied
        if applied.next_seq is None:
            applied.next_seq = seq  # a foreign publisher without replay: begin with this batch
        if seq < applied.next_seq:
            if self.applied.has(seq, batch):
                self.counts["duplicates"] += 1
                return []
            self._drop()
            self._buffer.append(came)
            return self._recover(came, now)
        if seq > applied.next_seq:
            self.counts["gaps"] += 1
            if self.peer is not Peer.FOREIGN or now >= self._no_replay_until:
                self._buffer.append(came)
                return self._fill(None, now)
            self.applied.accept_gap(seq, now)
        self._apply(seq, batch)
        return []

    def _apply(self, seq: int, batch: EventBatch | None) -> None:
        """Apply the next batch."""
        self.applied.apply(seq, batch)
        behind = self._checks.behind
        if behind is not None and seq >= behind[0]:
            self._checks.behind = None

    def _new_buffer(self) -> WaitingBatches:
        return WaitingBatches(self._config.buffer, self._config.buffer_bytes)

    def _drop(self) -> None:
        """Drop everything at once: it is another process."""
        self.applied.forget()
        self._verified = True
        self.epoch = None
        self._checks.behind = None
        self._checks.missed = 0


_DISCONNECTED, _HELLO, _REPLAY, _SNAPSHOT, _CHUNKS, _BACKOFF, _LIVE, _CHECKING = SubscriptionState

TABLE = table_of(KvSubscription)
