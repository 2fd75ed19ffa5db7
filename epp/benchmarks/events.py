"""Measure the time from an engine's publishing of KV events until a pick would use them. Prints JSON rows.

    python epp/benchmarks/events.py [--engines 8 100] [--seconds 8]

Another process plays the engines: each has a PUB socket of its own and sends a batch after a random 20 to 50 ms, of 1
to 64 new blocks of 16 tokens, which continue the chain of the batches before them (five make a prompt), and of the
removal of the blocks that it announced 20 batches ago. A batch carries the time at which it is given to ZMQ. This
process follows every engine as the picker does: `KvConnection` with `KvSubscription` on uvloop, one `Index`, its
housekeeping each 100 ms. A batch counts as routable when the subscription that took it has no work left. Both processes
share the machine and its clock. The run fails if a batch is missing at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import json
import multiprocessing
import random
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import cast

import uvloop
import zmq
from tree import SCOPE, VOCABULARY, Vocabulary
from treeline_epp.endpoints.adapters.base import KvSource
from treeline_epp.index.index import Index
from treeline_epp.kvevents.connection import KvCallbacks, KvConnection, KvStats, Ticker, new_context
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_wire import frames
from treeline_wire.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from treeline_wire.frames import Request
from treeline_wire.keys import PrefixKeys

WIDTH = 16
PAYLOADS, KEPT, PROMPT = 40, 20, 5
"""Number of batches that an engine repeats, that it holds at a time, and that make one prompt."""
WARM_S = 1.0
PATIENCE_S = 30.0


def payloads(rng: random.Random) -> list[bytes]:
    """Return an engine's batches; each removes the blocks stored `KEPT` batches before."""
    stored: list[BlockStored] = []
    for number in range(PAYLOADS):
        hashes = [rng.getrandbits(63) for _ in range(rng.randrange(1, 65))]
        parent = stored[-1].block_hashes[-1] if number % PROMPT else None
        tokens = rng.choices(range(VOCABULARY), k=WIDTH * len(hashes))
        stored.append(BlockStored(hashes, parent, tokens, WIDTH, medium="GPU"))
    return [
        encode_batch(0.0, [BlockRemoved(stored[number - KEPT].block_hashes[::-1]), each])
        for number, each in enumerate(stored)
    ]


def play(count: int, seconds: float, pipe: Connection) -> None:
    """Run the engines' process: send for this long, then report how many batches each has sent."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 64)
    sockets = []
    for _ in range(count):
        sock = context.socket(zmq.PUB)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.bind("tcp://127.0.0.1:*")
        sockets.append(sock)
    texts = [payloads(random.Random(number)) for number in range(count)]
    pipe.send([int(sock.last_endpoint.rpartition(b":")[2]) for sock in sockets])
    pipe.recv()
    rng, sent, begin = random.Random(0), [0] * count, time.monotonic()
    due = [(begin + rng.uniform(0, 0.05), number) for number in range(count)]
    heapq.heapify(due)
    while due[0][0] < begin + seconds:
        at, number = due[0]
        time.sleep(max(0.0, at - time.monotonic()))
        payload = texts[number][sent[number] % PAYLOADS]
        stamped = payload[:2] + struct.pack(">d", time.time()) + payload[10:]  # `[ts, …` of a MessagePack array
        sockets[number].send_multipart(frames.live(b"", sent[number], stamped))
        sent[number] += 1
        heapq.heapreplace(due, (at + rng.uniform(0.02, 0.05), number))
    pipe.send(sent)
    pipe.recv()
    context.destroy(linger=0)


class Timed(KvSubscription):
    """Records in `routable` when each batch was sent, and its age when all its work was done; seconds."""

    routable: list[tuple[float, float]]
    _open: list[float]

    def on_live(self, seq: int, batch: EventBatch | None, now: float) -> list[Request]:
        assert batch is not None
        self._open.append(batch.ts)
        asked = super().on_live(seq, batch, now)
        self._look()
        return asked

    def on_turn(self, now: float) -> list[Request]:
        asked = super().on_turn(now)
        self._look()
        return asked

    def _look(self) -> None:
        if self._open and not self.busy:
            at = time.time()
            self.routable += [(sent, at - sent) for sent in self._open]
            self._open.clear()


async def follow(ports: list[int], pipe: Connection) -> list[float]:
    """Return the seconds that each batch took; those sent in the first `WARM_S` are left out."""
    index, keys = Index(), cast(PrefixKeys, Vocabulary(random.Random(1)))
    context, ticker, stats = new_context(), Ticker(), KvStats()
    subscriptions, routable = [], list[tuple[float, float]]()
    tasks = [asyncio.create_task(ticker.run()), asyncio.create_task(_keep(index))]
    for number, port in enumerate(ports):
        one = Timed(index, index.add_pod(f"e{number}", SCOPE), keys, ours=False, replays=False)
        one.routable, one._open = routable, []
        subscriptions.append(one)
        callbacks = KvCallbacks(one, lambda _load: (), lambda: None, lambda: 0, stats)
        run = KvConnection(context, ticker, KvSource("127.0.0.1", port), callbacks, None).run()
        tasks.append(asyncio.create_task(run))
    await _until(lambda: all(one.live for one in subscriptions), "connections")
    gc.freeze()
    pipe.send("begin")
    warm = time.time() + WARM_S
    sent = await asyncio.to_thread(pipe.recv)
    await _until(lambda: [one.next_seq for one in subscriptions] == sent, "batches")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
    assert stats.batches == sum(sent)
    assert not any(one.counts["gaps"] for one in subscriptions)
    index.check()
    return [delay_s for sent_at, delay_s in routable if sent_at >= warm]


async def _keep(index: Index) -> None:
    while True:
        await asyncio.sleep(0.1)
        index.tick(time.monotonic())


async def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all {what} came")
        await asyncio.sleep(0.01)


def measure(count: int, seconds: float) -> None:
    ours, theirs = multiprocessing.Pipe()
    engines = multiprocessing.get_context("spawn").Process(target=play, args=(count, seconds, theirs), daemon=True)
    engines.start()
    try:
        ports = ours.recv()
        cpu, wall = time.process_time(), time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            delays_s = sorted(runner.run(follow(ports, ours)))
        cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
        ours.send("end")
        engines.join(PATIENCE_S)
    finally:
        engines.kill()
    row(f"tree.event_batches_s.{count}", len(delays_s) / (seconds - WARM_S), "batches/s")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        delay_s = delays_s[int(share * (len(delays_s) - 1))]
        row(f"tree.event_to_routable_ms.{name}.{count}", 1e3 * delay_s, "ms")
    row(f"tree.event_cores.{count}", cores, "cores")


def row(metric: str, value: float, unit: str) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 3), "unit": unit}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 100])
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    gc.set_threshold(50_000, 50, 50)  # as in the picker
    for count in arguments.engines:
        measure(count, arguments.seconds)


if __name__ == "__main__":
    main()
