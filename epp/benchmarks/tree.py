"""Measure the prefix index: matching, applying events, memory. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/tree.py [--sequences 2000] [--blocks 450] [--pods 8]
    python epp/benchmarks/tree.py --versus-dynamo           # beside it, where `ai-dynamo-runtime` is installed
    python epp/benchmarks/tree.py --full                    # memory of 100 endpoints with 30,000 blocks each

The world: a vocabulary of 32,000 tokens of about 4 bytes whose frequencies follow Zipf's law, as those of text do;
sequences of 450 blocks of 16 tokens (7,200 tokens, about 30 KB), each sharing the first 50 blocks with nine others;
engines announce 128 blocks an event, as a chunked prefill of 2,048 tokens does, and remove 64 an event, leaves first.
One process, one core. Payloads are encoded beforehand; everything from `decode_batch` on is timed, in CPU time.

Beside Dynamo's RadixTree the same sequences are in both; one in ten is looked up, by 450 hashes there and by the bytes
of its text here. Dynamo's tree works in a thread of its own, so both are timed in CPU time of the process and, as a
caller waits, in wall time. Making the hashes of tokens, and tokens of texts, which only Dynamo needs, is not timed.
"""

import argparse
import gc
import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import cast

from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod
from treeline_wire.events import BlockRemoved, BlockStored, decode_batch, encode_batch
from treeline_wire.keys import PrefixKeys

WIDTH = 16
EVENT_BLOCKS = 128
GROUP = 10
SHARED_BLOCKS = 50
SCOPE = "model"
BATCH = 100
"""Sequences whose payloads are made before the clock runs: making them must not evict the index from the CPU caches."""
VOCABULARY = 32_000
FREQUENCIES = list(accumulate(1 / (rank + 2.7) for rank in range(1, VOCABULARY + 1)))
"""Zipf's law with Mandelbrot's shift, as English words follow it."""


class Vocabulary:
    """The bytes of each token id: the index needs nothing else of a tokenizer."""

    def __init__(self, rng: random.Random, size: int = VOCABULARY) -> None:
        letters = b"abcdefghijklmnopqrstuvwxyz      .,"
        lengths = rng.choices(range(1, 12), weights=[2, 12, 20, 22, 16, 10, 7, 5, 3, 2, 1], k=size)
        self.token_bytes = [bytes(rng.choices(letters, k=length)) for length in lengths]


class Sequence:
    """Tokens of a prompt and the hashes of its blocks."""

    def __init__(self, rng: random.Random, blocks: int, shared: "Sequence | None" = None) -> None:
        keep = SHARED_BLOCKS if shared is not None else 0
        count = (blocks - keep) * WIDTH
        self.hashes: list[int] = [rng.getrandbits(64) for _ in range(blocks - keep)]
        self.tokens: list[int] = rng.choices(range(VOCABULARY), cum_weights=FREQUENCIES, k=count)
        if shared is not None:
            self.hashes = shared.hashes[:keep] + self.hashes
            self.tokens = shared.tokens[: keep * WIDTH] + self.tokens

    def payloads(self) -> Iterator[bytes]:
        for at in range(0, len(self.hashes), EVENT_BLOCKS):
            hashes = self.hashes[at : at + EVENT_BLOCKS]
            tokens = self.tokens[at * WIDTH : (at + len(hashes)) * WIDTH]
            parent = self.hashes[at - 1] if at else None
            yield encode_batch(1.0, [BlockStored(hashes, parent, tokens, WIDTH, medium="GPU")])


def sequences(rng: random.Random, count: int, blocks: int) -> Iterator[Sequence]:
    first: Sequence | None = None
    for number in range(count):
        if number % GROUP == 0:
            first = Sequence(rng, blocks)
            yield first
        else:
            yield Sequence(rng, blocks, first)


class World:
    """An index, its pods, and the vocabulary of their model."""

    def __init__(self, pods: int) -> None:
        self.keys = cast(PrefixKeys, Vocabulary(random.Random(1)))
        self.index = Index()
        self.pods = [self.index.add_pod(f"pod-{number}", SCOPE) for number in range(pods)]

    def pod(self, number: int) -> Pod:
        return self.pods[number % len(self.pods)]

    def key(self, tokens: list[int]) -> bytes:
        return b"".join([self.keys.token_bytes[token] for token in tokens])

    def feed(self, pod: Pod, payload: bytes) -> None:
        apply = self.index.apply
        for event in decode_batch(payload).events:
            apply(pod, event, self.keys)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def row(metric: str, value: float, unit: str) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 3), "unit": unit}) + "\n")


def median_match_us(world: World, keys: list[bytes], rounds: int) -> float:
    """Return the median time of one match; keys take turns, so that no key stays in the CPU caches."""
    times = []
    for _ in range(rounds):
        for key in keys:
            begin = time.perf_counter_ns()
            world.index.match(SCOPE, None, key, 0.0)
            times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def memory_and_match(world: World, count: int, blocks: int) -> None:
    """Measure memory and matching. Sequences are made and dropped one by one, so that the process grows by the index
    alone.
    """
    rng = random.Random(2)
    prompts: list[bytes] = []
    gc.collect()
    before = resident_bytes()
    for number, each in enumerate(sequences(rng, count, blocks)):
        for payload in each.payloads():
            world.feed(world.pod(number), payload)
        if number % 10 == 3:
            prompts.append(world.key(each.tokens[:2700]))
    gc.collect()
    grown = resident_bytes() - before - sum(map(len, prompts))
    totals = world.index.totals()
    row("tree.blocks", totals["blocks"], "blocks")
    row("tree.text_bytes_per_block", totals["text_bytes"] / totals["blocks"], "B")
    row("tree.bytes_per_block", (grown - totals["text_bytes"]) / totals["blocks"], "B")
    row("tree.match_us.2700", median_match_us(world, prompts[:200], 20), "us")
    long_prompts = []
    for number in range(4):
        each = Sequence(rng, 6250)
        for payload in each.payloads():
            world.feed(world.pod(number), payload)
        long_prompts.append(world.key(each.tokens))
    row("tree.match_us.100k", median_match_us(world, long_prompts, 50), "us")
    world.index.check()


def ingest_and_remove(world: World, count: int, blocks: int) -> None:
    """Measure events: a hundred sequences are announced at a time; then the last ones are removed, without shared
    blocks.
    """
    announced = 0
    spent = 0.0
    last: list[tuple[Pod, list[int]]] = []
    stream = enumerate(sequences(random.Random(3), count, blocks))
    while batch := list(islice(stream, BATCH)):
        payloads = [(world.pod(number), payload) for number, each in batch for payload in each.payloads()]
        begin = time.process_time()
        for pod, payload in payloads:
            world.feed(pod, payload)
        spent += time.process_time() - begin
        announced += sum(len(each.hashes) for _, each in batch)
        last = [(world.pod(number), each.hashes) for number, each in batch]
    row("tree.ingest_blocks_s", announced / spent, "blocks/s")
    removals = []
    for pod, hashes in last:
        tail = hashes[: SHARED_BLOCKS - 1 : -1]
        runs = [tail[at : at + 64] for at in range(0, len(tail), 64)]
        removals += [(pod, encode_batch(2.0, [BlockRemoved(run)])) for run in runs]
    before = world.index.totals()["blocks"]
    begin = time.process_time()
    for pod, payload in removals:
        world.feed(pod, payload)
    spent = time.process_time() - begin
    row("tree.remove_blocks_s", (before - world.index.totals()["blocks"]) / spent, "blocks/s")
    world.index.check()


def versus_dynamo(world: World, count: int, blocks: int) -> None:
    """Measure lookups of sequences that both know, ours and Dynamo's in turns."""
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    theirs = RadixTree()
    wanted: list[tuple[bytes, list[int]]] = []
    for number, each in enumerate(sequences(random.Random(4), count, blocks)):
        pod = number % len(world.pods)
        for payload in each.payloads():
            world.feed(world.pods[pod], payload)
        stored = [{"block_hash": block, "tokens_hash": block} for block in each.hashes]
        data = {"stored": {"parent_hash": None, "blocks": stored}}
        theirs.apply_event(pod, json.dumps({"event_id": number, "data": data}).encode())
        if number % 10 == 3:
            wanted.append((world.key(each.tokens), each.hashes))
    for key, hashes in wanted:
        assert max(theirs.find_matches(hashes).scores.values()) == blocks
        # A prompt's last block counts only if text follows: an engine computes at least one token.
        assert world.index.match(SCOPE, None, key, 0.0).longest.tokens == (blocks - 1) * WIDTH
    found = {"ours": [0.0, 0.0], "theirs": [0.0, 0.0]}
    for _ in range(10):
        for name in found:
            cpu, wall = time.process_time(), time.perf_counter()
            for key, hashes in wanted:
                if name == "ours":
                    world.index.match(SCOPE, None, key, 0.0)
                else:
                    theirs.find_matches(hashes)
            found[name][0] += time.process_time() - cpu
            found[name][1] += time.perf_counter() - wall
    for at, clock in enumerate(("cpu", "wall")):
        for name, times in found.items():
            row(f"tree.lookup_us.{blocks}.{name}.{clock}", times[at] / len(wanted) / 10 * 1e6, "us")
    row("tree.vs_dynamo.lookup", found["ours"][0] / found["theirs"][0], "ratio")
    row("tree.vs_dynamo.lookup_wall", found["ours"][1] / found["theirs"][1], "ratio")


def full_fleet(endpoints: int = 100, blocks: int = 30_000, length: int = 450) -> None:
    """Measure the memory of a picker's process whose endpoints have full caches; sequences share beginnings as
    above.
    """
    importlib.import_module("treeline_epp.main")  # a picker's modules count, too
    world = World(endpoints)
    stream = sequences(random.Random(5), endpoints * blocks, length)
    for number in range(endpoints * blocks // length):
        for payload in next(stream).payloads():
            world.feed(world.pod(number), payload)
    gc.collect()
    row("tree.full_blocks", world.index.totals()["blocks"], "blocks")
    row("tree.rss_mb.100x30k", resident_bytes() / 1e6, "MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=450)
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--versus-dynamo", action="store_true")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    gc.freeze()
    if args.full:
        full_fleet()
        return 0
    if args.versus_dynamo:
        versus_dynamo(World(args.pods), args.sequences, args.blocks)
        return 0
    for measure in (memory_and_match, ingest_and_remove):
        measure(World(args.pods), args.sequences, args.blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
