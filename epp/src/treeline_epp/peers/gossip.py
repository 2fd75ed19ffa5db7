"""The protocol between pickers, without I/O: datagrams and the time in, datagrams out.

Each picker sends the changes of its requests to all others, some milliseconds of them in one numbered datagram; and at
least every `BEAT_S` a sign of life. A new picker, or one with a gap, is asked for all its requests in flight. A picker
that is silent for `DEAD_S` is forgotten with its requests, and so is one at whose address another has started.

All hold one key (`seal.py`); datagrams that are not sealed with it are dropped unread. No peer can make this grow
beyond `MOST_PEERS` × (`ledger.MOST_OPEN` requests, `sequence.MOST_WAITING` deltas, one snapshot) and
`landmarks.MOST_KEPT` marks.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from treeline_wire.errors import WireError
from treeline_wire.peers import (
    MOST_PARTS,
    Ask,
    Delta,
    Leave,
    Message,
    Record,
    Snapshot,
    decode,
    encode,
    packed,
)

from treeline_epp.peers.landmarks import Landmarks
from treeline_epp.peers.ledger import MOST_PENDING, Others, Own, Places
from treeline_epp.peers.seal import Seal
from treeline_epp.peers.sequence import News
from treeline_epp.peers.sequence import Sequence as DeltaSequence
from treeline_epp.picking.picker import Picker

FLUSH_S = 0.002
"""Changes within this time after a datagram go out together; otherwise at once: each request of a burst should be
chosen in the knowledge of the one before."""
CLOSED_S = 0.01
"""Longest that the end of a request waits for other changes: load reports show it, too."""
BEAT_S = 0.5
DEAD_S = 3.0
MOST_PEERS = 64
_SWEEP_S = 1.0
_ANSWER_S = 0.05
"""Least seconds between answers to one address: a snapshot is large, and a question small."""
_MOST_ANSWERED = 1024
"""Most answered questions that are remembered: a repeated one, from any sender, is not answered again."""

Address = tuple[str, int]
Outgoing = tuple[bytes, Address | None]
"""A datagram and its receiver; None: all."""


@dataclass(eq=False, slots=True)
class _Peer:
    address: Address
    sequence: DeltaSequence
    others: Others


class Gossip:
    """The state of the exchange; see the module. `own` is to be the picker's `elsewhere`. All times are monotonic."""

    def __init__(self, picker: Picker, key: bytes, seal: Seal | None = None) -> None:
        self.landmarks = Landmarks(int.from_bytes(key[:8], "big"))
        self.own = Own(self.landmarks)
        self.counts: Counter[str] = Counter()
        self.told_bytes = 0
        self._picker = picker
        self._places = Places(picker)
        self._seal = seal or Seal(key)
        self._peers: dict[bytes, _Peer] = {}
        self._seq = 0
        self._sent_at = self._flushed_at = float("-inf")
        self._swept_at = float("-inf")
        self._asked: dict[Address, float] = {}
        self._answered: deque[bytes] = deque(maxlen=_MOST_ANSWERED)
        self._unplaced = 0

    @property
    def addresses(self) -> Collection[Address]:
        """The addresses of pickers that have answered us."""
        return {peer.address for peer in self._peers.values() if peer.sequence.in_step}

    @property
    def in_step(self) -> int:
        """The number of other pickers whose requests are known."""
        return sum(peer.sequence.in_step for peer in self._peers.values())

    @property
    def elsewhere(self) -> int:
        """The number of other pickers' requests in flight."""
        return sum(len(peer.others) for peer in self._peers.values())

    @property
    def unplaced(self) -> int:
        """The number of other pickers' requests so far at endpoints that are unknown here."""
        return self._unplaced + sum(peer.others.unplaced for peer in self._peers.values())

    # Input

    def on_datagram(self, datagram: bytes, address: Address, now: float) -> Sequence[Outgoing]:
        """Take a datagram from any sender; return the datagrams to send. Never raises."""
        self.counts["received"] += 1
        opened = self._seal.open(datagram)
        if opened is None:
            self.counts["refused"] += 1
            return ()
        sender, content = opened
        if sender == self._seal.sender:
            return ()  # the peers' name may resolve to us, too
        try:
            message = decode(content)
        except WireError:
            self.counts["refused"] += 1
            return ()
        if isinstance(message, Ask):
            return self._answer(message, address, now)
        peer = self._peers.get(sender)
        if isinstance(message, Leave):
            self._forget(sender, now)
        elif isinstance(message, Snapshot):
            if peer is not None:
                news = peer.sequence.on_part(message, now)
                if news.snapshot is not None:  # the answer is fresh, and so is its address
                    self._succeed(sender, peer, address, now)
                self._take(peer, news, now)
        else:
            peer = peer or self._meet(sender, address, now)
            if peer is not None:
                if not peer.sequence.in_step:
                    peer.address = address  # its address is not known for sure until it has answered from there
                self._take(peer, peer.sequence.on_delta(message, now), now)
                return self._question(sender, peer, now)
        return ()

    def _meet(self, sender: bytes, address: Address, now: float) -> _Peer | None:
        """Add a new picker; if there are too many, drop one that has never answered."""
        if len(self._peers) >= MOST_PEERS:
            strange = next((one for one, peer in self._peers.items() if not peer.sequence.in_step), None)
            if strange is None:
                self.counts["refused"] += 1
                return None
            self._forget(strange, now)
        peer = _Peer(address, DeltaSequence(now), Others(self._picker, self.landmarks, self._places))
        self._peers[sender] = peer
        return peer

    def _succeed(self, sender: bytes, peer: _Peer, address: Address, now: float) -> None:
        """Record the address from which a picker has answered: any other picker at it is gone."""
        peer.address = address
        for one in [one for one, other in self._peers.items() if other.address == address and one != sender]:
            self._forget(one, now)

    def _forget(self, sender: bytes, now: float) -> None:
        peer = self._peers.pop(sender, None)
        if peer is not None:
            self._unplaced += peer.others.unplaced
            peer.others.clear(now)

    def _take(self, peer: _Peer, news: News, now: float) -> None:
        if news.snapshot is not None:
            self.counts["snapshots"] += 1
            peer.others.reconcile(news.snapshot, now)
        for record in news.records:
            peer.others.apply(record, now)

    def _question(self, sender: bytes, peer: _Peer, now: float) -> Sequence[Outgoing]:
        nonce = peer.sequence.question(now)
        return () if nonce is None else [self._sealed(Ask(sender, nonce), peer.address)]

    def _answer(self, ask: Ask, address: Address, now: float) -> Sequence[Outgoing]:
        often = now < self._asked.get(address, float("-inf")) + _ANSWER_S
        if ask.whom != self._seal.sender or often or ask.nonce in self._answered:
            return ()
        self._asked[address] = now
        self._answered.append(ask.nonce)
        out = [*self.flush(now)]  # the snapshot must be the state after the newest delta
        records = self.own.snapshot(now)
        counts = packed(records)[:MOST_PARTS] or [0]
        start = 0
        for part, count in enumerate(counts):
            some = tuple(records[start : start + count])
            out.append(self._sealed(Snapshot(ask.nonce, self._seq, part, len(counts), some), address))
            start += count
        return out

    # Output

    def due_in(self, now: float, *, urgent: bool) -> float:
        """Return how long to wait with a flush after a call of `own.wake`."""
        return max(0.0, self._flushed_at + FLUSH_S - now) if urgent else CLOSED_S

    def flush(self, now: float) -> Sequence[Outgoing]:
        """Return the changes since the last flush, for all peers. Call it `due_in` after `own.wake`."""
        records = self.own.take()
        if len(records) > MOST_PENDING:
            self._seq += 1  # no picker gets this number, so each of them asks
            records = []
        out, start = [], 0
        for count in packed(records):
            out.append(self._delta(tuple(records[start : start + count])))
            start += count
        if out:
            self._sent_at = self._flushed_at = now
        return out

    def tick(self, now: float) -> Sequence[Outgoing]:
        """Housekeeping, beats and questions. Call about every 50 ms."""
        self.landmarks.tick(now)
        for sender in [one for one, peer in self._peers.items() if now >= peer.sequence.heard_at + DEAD_S]:
            self._forget(sender, now)
        if now >= self._swept_at + _SWEEP_S:
            self._swept_at = now
            self._asked = {address: at for address, at in self._asked.items() if now < at + _ANSWER_S}
            for peer in self._peers.values():
                peer.others.tick()
        out = [*itertools.chain.from_iterable(self._question(*known, now) for known in self._peers.items())]
        if now >= self._sent_at + BEAT_S:
            self._sent_at = now
            out.append(self._delta(()))
        return out

    def leave(self) -> Sequence[Outgoing]:
        """Return the goodbye."""
        return [self._sealed(Leave(), None)]

    def _delta(self, records: tuple[Record, ...]) -> Outgoing:
        self._seq += 1
        return self._sealed(Delta(self._seq, records), None)

    def _sealed(self, message: Message, to: Address | None) -> Outgoing:
        datagram = self._seal.close(encode(message))
        if to is None:
            self.told_bytes += len(datagram)
        return datagram, to

    def check(self) -> None:
        """Assert the invariants."""
        self.landmarks.check()
        assert len(self._peers) <= MOST_PEERS
        for endpoint in self._picker.endpoints.values():
            endpoint.load.reservations.check()
