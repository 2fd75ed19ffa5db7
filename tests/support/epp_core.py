"""Naive models and a simulated engine for the picker's core; an index, and a publisher with scripted answers."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from treeline_epp.index.event_filter import Tier
from treeline_epp.index.index import Index
from treeline_epp.index.limits import IndexLimits
from treeline_epp.index.matching import GUARD_BYTES
from treeline_epp.index.pods import Hit, Pod
from treeline_epp.kvevents.reading import Replayed, answer_of
from treeline_epp.kvevents.states import Peer, SubscriptionConfig
from treeline_epp.kvevents.states import SubscriptionState as State
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    block_hash,
    decode_batch,
    encode_batch,
    hash_of,
    root_digest,
)
from treeline_wire.frames import (
    Hello,
    HelloRequest,
    ReplayEnd,
    ReplayItem,
    ReplayRequest,
    Reply,
    Request,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
    SnapshotRequest,
)
from treeline_wire.keys import PrefixKeys


@dataclass(frozen=True)
class Block:
    """One block of the naive model: `text` is everything from the beginning of the prompt to the block's end."""

    parent: int | None
    text: bytes
    tokens: int


@dataclass
class NaiveTree:
    """A plain model of the tree: each block with its whole text, each pod with its hashes. `ever` also has blocks that
    no pod holds any more."""

    blocks: dict[int, Block] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=dict)
    ever: dict[int, Block] = field(default_factory=dict)

    def store(
        self, parent: int | None, hashes: Sequence[int], pieces: Sequence[bytes], width: int, bit: int
    ) -> list[int]:
        before = []
        held = self.held.setdefault(bit, set())
        for block, piece in zip(hashes, pieces, strict=True):
            if block not in self.blocks:
                above = Block(None, b"", 0) if parent is None else self.blocks[parent]
                self.blocks[block] = self.ever[block] = Block(parent, above.text + piece, above.tokens + width)
            if block in held:
                before.append(block)
            held.add(block)
            parent = block
        return before

    def remove(self, hashes: Sequence[int], bit: int) -> int:
        unknown = 0
        held = self.held.setdefault(bit, set())
        for block in hashes:
            if block in held:
                held.remove(block)
            else:
                unknown += 1
        self._drop_unheld()
        return unknown

    def clear(self, bit: int) -> None:
        self.held[bit] = set()
        self._drop_unheld()

    def _drop_unheld(self) -> None:
        alive = set().union(*self.held.values())
        self.blocks = {block: known for block, known in self.blocks.items() if block in alive}

    def match(self, key: bytes, pods: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Return for each pod, by its bit, the least and the most tokens of `key` that it holds and that are proved. A
        block is proved by later blocks that match the key for GUARD_BYTES beyond its end. The least counts blocks that
        are held with all blocks in between; where some of these are gone, the tree may know or not."""
        least, most = (dict.fromkeys(self.ever, 0) for _ in range(2))
        for known in self.blocks.values():
            matched, parent, unbroken = _common(key, known.text), known.parent, True
            while parent is not None and (matched > most[parent] or (unbroken and matched > least[parent])):
                unbroken = unbroken and parent in self.blocks
                most[parent] = max(most[parent], matched)
                if unbroken:
                    least[parent] = max(least[parent], matched)
                parent = self.ever[parent].parent
        held = [set().union(*(self.held.get(bit, set()) for bit in bits)) for bits in pods]
        return [(self._run(key, blocks, least), self._run(key, blocks, most)) for blocks in held]

    def _run(self, key: bytes, held: set[int], extents: Mapping[int, int]) -> int:
        good: dict[int, bool] = {}

        def counts(block: int | None) -> bool:
            if block is None:
                return True
            if block not in good:
                good[block] = False  # a cycle does not count
                known = self.blocks.get(block)
                good[block] = (
                    block in held and known is not None and key.startswith(known.text) and counts(known.parent)
                )
            return good[block]

        def proved(block: int) -> bool:
            return extents.get(block, 0) >= len(self.blocks[block].text) + GUARD_BYTES

        return max((self.blocks[block].tokens for block in held if counts(block) and proved(block)), default=0)


def _common(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


class TableKeys:
    """Prefix keys of an invented tokenizer: token i is one of 256 short strings."""

    def __init__(self) -> None:
        rng = random.Random("vocabulary")
        self.token_bytes = [bytes(rng.choices(b"abcdefgh ", k=rng.randrange(1, 5))) for _ in range(256)]


KEYS = cast(PrefixKeys, TableKeys())
WIDTH = 4


@dataclass
class SimBlock:
    parent: int | None
    tokens: list[int]
    digest: bytes


class SimEngine:
    """An engine's cache and publisher: `blocks` is the cache, `step` returns the published batch. `ours`: it answers
    hello and snapshot, and has a cache in `host` memory. `replays`: it has a replay socket. The ring is short on
    purpose."""

    def __init__(self, rng: random.Random, *, ours: bool = True, replays: bool = True, ring: int = 6) -> None:
        self.rng = rng
        self.ours = ours
        self.replays = replays
        self.ring_size = ring
        self.epoch = 0
        self.clock = 1000.0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1 + self.rng.randrange(1000)
        self.blocks: dict[int, SimBlock] = {}
        self.host: dict[int, SimBlock] = {}
        self.seq = 0
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=self.ring_size)

    @property
    def newest(self) -> int | None:
        return self.seq - 1 if self.seq else None

    def step(self) -> tuple[int, bytes]:
        """Change the cache; return the live batch."""
        rng = self.rng
        events: list[Event] = []
        for _ in range(rng.randrange(1, 4)):
            action = rng.choices([self._store, self._evict, self._clear], [6, 4, 0.15])[0]
            events += action()
            if self.ours:
                events += rng.choices([self._back_up, self._forget], [2, 1])[0]()
        self.clock += rng.random()
        payload = encode_batch(self.clock, events)
        seq, self.seq = self.seq, self.seq + 1
        self.ring.append((seq, payload))
        return seq, payload

    def _store(self) -> list[Event]:
        rng = self.rng
        parent = rng.choice([None, *self.blocks]) if rng.random() < 0.8 else None
        digest = root_digest(None) if parent is None else self.blocks[parent].digest
        above = parent
        hashes, tokens = [], []
        for _ in range(rng.randrange(1, 5)):
            ids = [rng.randrange(4) for _ in range(WIDTH)]  # few tokens, so that blocks come back
            digest = block_hash(digest, ids)
            value = hash_of(digest)
            if value in self.blocks:
                if hashes:
                    break
                parent = above = value
                continue
            self.blocks[value] = SimBlock(above, ids, digest)
            hashes.append(value)
            tokens += ids
            above = value
        return [BlockStored(hashes, parent, tokens, WIDTH)] if hashes else []

    def _evict(self) -> list[Event]:
        rng = self.rng
        gone = []
        for _ in range(rng.randrange(1, 6)):
            parents = {block.parent for block in self.blocks.values()}
            leaves = [value for value in self.blocks if value not in parents]
            if leaves:
                gone.append(rng.choice(leaves))
                del self.blocks[gone[-1]]
        return [BlockRemoved(gone)] if gone else []

    def _back_up(self) -> list[Event]:
        """Copy a block to host memory."""
        left = [value for value in self.blocks if value not in self.host]
        if not left:
            return []
        value = self.rng.choice(left)
        block = self.host[value] = self.blocks[value]
        return [BlockStored([value], block.parent, block.tokens, WIDTH, medium="CPU")]

    def _forget(self) -> list[Event]:
        """Drop a block of host memory; its descendants may stay."""
        if not self.host:
            return []
        value = self.rng.choice(list(self.host))
        del self.host[value]
        return [BlockRemoved([value], medium="CPU")]

    def _clear(self) -> list[Event]:
        self.blocks.clear()
        self.host.clear()
        return [AllBlocksCleared()]

    def answer(self, send: Request) -> list[Reply]:
        match send:
            case HelloRequest() if self.ours:
                return [Hello(self.epoch, self.ring[0][0] if self.ring else None, self.newest)]
            case ReplayRequest(start) if self.replays:
                return [*(ReplayItem(b"", seq, p) for seq, p in self.ring if seq >= start), ReplayEnd()]
            case SnapshotRequest() if self.ours:
                chunks: list[Reply] = []
                done: set[int | None] = {None}
                left = dict(self.blocks)
                while left:
                    ready = [value for value, block in left.items() if block.parent in done]
                    events = [BlockStored([v], left[v].parent, left.pop(v).tokens, WIDTH) for v in ready]
                    done.update(ready)
                    chunks.append(SnapshotChunk(events))
                for value, block in self.host.items():
                    stored = BlockStored([value], block.parent, block.tokens, WIDTH, medium="CPU")
                    chunks.append(SnapshotChunk([stored]))
                header = SnapshotHeader(self.epoch, self.seq - 1, len(self.blocks))
                return [header, *chunks, SnapshotEnd()]
        return []


class Lab:
    """An engine, a subscription, and an unreliable link between them. `loss`: share of live batches lost. `slow`:
    chance that an answer takes longer than any deadline. `told`: the subscription knows from the beginning what kind of
    publisher it is."""

    STEP_S = 0.05

    def __init__(
        self,
        seed: int,
        *,
        loss: float = 0.0,
        slow: float = 0.0,
        ours: bool = True,
        replays: bool = True,
        engine: SimEngine | None = None,
        told: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.engine = engine or SimEngine(self.rng, ours=ours, replays=replays)
        self.index = Index()
        self.pod: Pod = self.index.add_pod("sim", "model")
        config = SubscriptionConfig(buffer=8)
        is_ours, has_replay = not told or self.engine.ours, not told or self.engine.replays
        self.subscription = KvSubscription(self.index, self.pod, KEYS, config, ours=is_ours, replays=has_replay)
        self.loss = loss
        self.slow = slow
        self.now = 0.0
        self.connected = False
        self._wire: list[tuple[float, int, object]] = []
        self._count = 0
        self._last: dict[str, float] = {}

    def connect(self) -> None:
        self.connected = True
        self.perform(self.subscription.on_connected(self.now))

    def disconnect(self) -> None:
        self.connected = False
        self._wire.clear()
        self.subscription.on_disconnected(self.now)

    def perform(self, sends: Sequence[Request]) -> None:
        sends = list(sends)
        while self.subscription.busy:
            sends += self.subscription.on_turn(self.now)
        for send in sends:
            delay = 5.0 if self.rng.random() < self.slow else self.rng.random() * 0.1
            for reply in self.engine.answer(send):
                self._send("replies", delay, reply)

    def _send(self, socket: str, delay: float, message: object) -> None:
        """Send over a socket: order is kept within each socket only."""
        at = max(self.now + delay, self._last.get(socket, 0.0))
        self._last[socket] = at
        self._count += 1
        self._wire.append((at, self._count, message))

    def publish(self) -> None:
        batch = self.engine.step()
        if self.connected and self.rng.random() >= self.loss:
            self._send("live", self.rng.random() * 0.1, batch)

    def again(self) -> None:
        """Deliver the newest batch once more."""
        self._send("live", self.rng.random() * 0.1, self.engine.ring[-1])

    def heartbeat(self) -> None:
        if self.connected and self.engine.ours:
            newest = self.engine.seq - 1 if self.rng.random() < 0.5 else None
            self.perform(self.subscription.on_heartbeat(self.engine.epoch, newest, self.now))

    def advance(self, seconds: float) -> None:
        """Deliver and tick; a load report comes every second."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.STEP_S
            due = sorted(entry for entry in self._wire if entry[0] <= self.now)
            for entry in due:
                if entry in self._wire:  # a disconnect meanwhile took the rest away
                    self._wire.remove(entry)
                    self._deliver(entry[2])
            if int(self.now) > int(self.now - self.STEP_S):
                self.heartbeat()
            self.perform(self.subscription.on_tick(self.now))
            self.index.tick(self.now, budget=7)

    def _deliver(self, message: object) -> None:
        if isinstance(message, tuple):
            seq, payload = message
            self.perform(self.subscription.on_live(seq, decode_batch(payload), self.now))
        else:
            self.perform(self.subscription.on_reply(answer_of(cast(Reply, message)), self.now))

    def known(self) -> set[int]:
        return self.index.blocks_of(self.pod)

    def assert_converged(self) -> None:
        subscription = self.subscription
        state = (subscription.state, subscription.epoch, subscription.next_seq, dict(subscription.counts))
        assert self.known() == set(self.engine.blocks), state
        host = self.pod.lower.get(Tier.HOST)
        assert (set() if host is None else self.index.blocks_of(host)) == set(self.engine.host), state
        self.index.check()


class Prompt:
    """A prompt's tokens, their key, and the blocks that an engine announces for them."""

    def __init__(self, tokens: Sequence[int], *, namespace: str | None = None, seed: bytes = b"") -> None:
        self.tokens = list(tokens)
        self.namespace = namespace
        self.key = b"".join(KEYS.token_bytes[token] for token in tokens)
        digest = root_digest(namespace) + seed
        self.hashes: list[int] = []
        for at in range(0, len(tokens) - WIDTH + 1, WIDTH):
            digest = block_hash(digest, self.tokens[at : at + WIDTH])
            self.hashes.append(hash_of(digest))

    @classmethod
    def random(cls, seed: int, blocks: int, **options: Any) -> "Prompt":
        return cls(random.Random(seed).choices(range(256), k=blocks * WIDTH), **options)

    def extended(self, seed: int, blocks: int) -> "Prompt":
        return Prompt([*self.tokens, *Prompt.random(seed, blocks).tokens], namespace=self.namespace)

    def stored(self, start: int = 0, stop: int | None = None, **fields: Any) -> BlockStored:
        hashes = self.hashes[start:stop]
        parent = self.hashes[start - 1] if start else None
        tokens = self.tokens[start * WIDTH : (start + len(hashes)) * WIDTH]
        fields.setdefault("cache_salt", self.namespace)
        return BlockStored(hashes, parent, tokens, WIDTH, **fields)

    def end(self, blocks: int) -> int:
        """Return the bytes of the first `blocks` blocks."""
        return len(b"".join(KEYS.token_bytes[token] for token in self.tokens[: blocks * WIDTH]))


SCOPE = "model"


def make_index(pods: int = 2, **limits: object) -> tuple[Index, list[Pod]]:
    """Return an index and pods of one scope in it."""
    index = Index(IndexLimits(**limits))  # type: ignore[arg-type]
    return index, [index.add_pod(f"pod-{i}", SCOPE) for i in range(pods)]


def hit(index: Index, pod: Pod, prompt: Prompt, now: float = 0.0) -> Hit:
    """Return the pod's hit for the prompt."""
    return index.match(SCOPE, prompt.namespace, prompt.key, now).hit(pod)


def blocks(index: Index, pod: Pod, prompt: Prompt, now: float = 0.0) -> int:
    """Return how many blocks of the prompt the pod holds."""
    tokens = hit(index, pod, prompt, now).tokens
    assert tokens % WIDTH == 0
    return tokens // WIDTH


def batch(ts: float, *events: Event) -> EventBatch:
    return EventBatch(ts, list(events))


def item(seq: int, of: EventBatch) -> Replayed:
    """Return a batch as it is replayed."""
    return Replayed(seq, of)


class Bench:
    """One publisher without an engine: the test chooses its answers."""

    def __init__(self) -> None:
        self.index = Index()
        self.pod = self.index.add_pod("pod", "model")
        self.subscription = KvSubscription(self.index, self.pod, KEYS)
        self.prompts = [Prompt.random(seed, 3) for seed in range(20)]

    def batch(self, number: int) -> EventBatch:
        """Return the batch that stores prompt `number`."""
        return batch(100.0 + number, self.prompts[number].stored())

    def holds(self, *numbers: int) -> bool:
        wanted = {block for number in numbers for block in self.prompts[number].hashes}
        return self.index.blocks_of(self.pod) == wanted

    def ours(self, now: float = 0.0, newest: int | None = None) -> None:
        """Return a bench of our publisher: connected, LIVE at epoch 1 with batches up to `newest`."""
        assert self.subscription.on_connected(now) == [HelloRequest()]
        if newest is None:
            assert self.subscription.on_reply(Hello(1), now) == []
        else:
            assert self.subscription.on_reply(Hello(1, 0, newest), now) == [SnapshotRequest()]
            self.snapshot(1, newest, range(newest + 1), now)
        assert self.subscription.state is State.LIVE

    def snapshot(self, epoch: int, seq: int, numbers: Sequence[int], now: float) -> None:
        subscription = self.subscription
        assert subscription.on_reply(SnapshotHeader(epoch, seq, 3 * len(numbers)), now) == []
        for number in numbers:
            assert subscription.on_reply(SnapshotChunk([self.prompts[number].stored()]), now) == []
        assert subscription.on_reply(SnapshotEnd(), now) == []

    def foreign(self, now: float = 0.0, replayed: int = 0) -> None:
        """Return a bench of a foreign publisher: connected, no answer to hello, `replayed` batches replayed."""
        assert self.subscription.on_connected(now) == [HelloRequest()]
        assert self.subscription.on_tick(now + 0.9) == []
        assert self.subscription.on_tick(now + 1.0) == [ReplayRequest(0)]
        for number in range(replayed):
            self.subscription.on_reply(item(number, self.batch(number)), now + 1.1)
        assert self.subscription.on_reply(ReplayEnd(), now + 1.1) == []
        assert self.subscription.state is State.LIVE
        assert self.subscription.peer is Peer.FOREIGN
