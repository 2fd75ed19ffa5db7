"""Measure the prefix index: matching, taking events in, memory. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/tree.py [--sequences 2000] [--blocks 450] [--pods 8]

The world: a vocabulary of 32,000 tokens of about 4 bytes whose frequencies fall as 1/rank, as those of text do;
sequences of 450 blocks of 16 tokens (7,200 tokens, about 30 KB), each sharing the first 50 blocks with nine others;
engines announce 128 blocks an event, as a chunked prefill of 2,048 tokens does, and remove 64 an event, leaves first.
One process, one core. Payloads are encoded beforehand; everything from `decode_batch` on is timed, in CPU time.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import cast

from treeline_epp.index import Index, Pod
from treeline_wire.events import BlockRemoved, BlockStored, decode_batch, encode_batch
from treeline_wire.keys import PrefixKeys

WIDTH = 16
EVENT_BLOCKS = 128
GROUP = 10
SHARED_BLOCKS = 50
SCOPE = "model"
VOCABULARY = 32_000
FREQUENCIES = list(accumulate(1 / (rank + 20) for rank in range(VOCABULARY)))


class Vocabulary:
    """Token id → bytes, all that the index wants of a tokenizer."""

    def __init__(self, rng: random.Random, size: int = VOCABULARY) -> None:
        letters = b"abcdefghijklmnopqrstuvwxyz      .,"
        lengths = rng.choices(range(1, 12), weights=[2, 12, 20, 22, 16, 10, 7, 5, 3, 2, 1], k=size)
        self.token_bytes = [bytes(rng.choices(letters, k=length)) for length in lengths]


class Sequence:
    """Tokens of a prompt and the hashes of its blocks."""

    def __init__(self, rng: random.Random, blocks: int, shared: "Sequence | None" = None) -> None:
        keep = SHARED_BLOCKS if shared is not None else 0
        self.hashes = shared.hashes[:keep] if shared is not None else []
        self.tokens = shared.tokens[: keep * WIDTH] if shared is not None else []
        self.hashes = self.hashes + [rng.getrandbits(64) for _ in range(blocks - keep)]
        self.tokens = self.tokens + rng.choices(
            range(VOCABULARY), cum_weights=FREQUENCIES, k=(blocks - keep) * WIDTH
        )

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


def feed(index: Index, pod: Pod, payload: bytes, keys: PrefixKeys) -> None:
    for event in decode_batch(payload).events:
        index.apply(pod, event, keys)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def row(metric: str, value: float, unit: str) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 3), "unit": unit}) + "\n")


def measure_match(index: Index, pods: list[Pod], keys: list[bytes], rounds: int) -> float:
    """Median µs of one match; keys take turns, so that no key stays in the processor's caches."""
    times = []
    for _ in range(rounds):
        for key in keys:
            begin = time.perf_counter_ns()
            index.match(SCOPE, None, key, pods, 0.0)
            times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=450)
    parser.add_argument("--pods", type=int, default=8)
    args = parser.parse_args()
    rng = random.Random(1)
    keys = cast(PrefixKeys, Vocabulary(rng))
    table = keys.token_bytes
    index = Index()
    pods = [index.add_pod(f"pod-{number}", SCOPE) for number in range(args.pods)]

    gc.collect()
    before = resident_bytes()
    announced = removed = 0
    spent = 0.0
    prompts: list[bytes] = []
    last: list[tuple[Pod, list[int]]] = []
    gc.freeze()
    for number, sequence in enumerate(sequences(rng, args.sequences, args.blocks)):
        pod = pods[number % len(pods)]
        payloads = list(sequence.payloads())
        begin = time.process_time()
        for payload in payloads:
            feed(index, pod, payload, keys)
        spent += time.process_time() - begin
        announced += len(sequence.hashes)
        if number % 10 == 3:
            prompts.append(b"".join(table[token] for token in sequence.tokens[:2700]))
        last = [*last[-50:], (pod, sequence.hashes)]
        del payloads, sequence
    row("tree.ingest_blocks_s", announced / spent, "blocks/s")
    gc.collect()
    grown = resident_bytes() - before - sum(map(len, prompts))
    totals = index.totals()
    row("tree.blocks", totals["blocks"], "blocks")
    row("tree.text_bytes_per_block", totals["text_bytes"] / totals["blocks"], "B")
    row("tree.bytes_per_block", (grown - totals["text_bytes"]) / totals["blocks"], "B")

    row("tree.match_us.2700", measure_match(index, pods, prompts[:200], 20), "us")
    long_prompts = []
    for number in range(4):
        sequence = Sequence(rng, 6250)
        for payload in sequence.payloads():
            feed(index, pods[number % len(pods)], payload, keys)
        long_prompts.append(b"".join(table[token] for token in sequence.tokens))
    row("tree.match_us.100k", measure_match(index, pods, long_prompts, 50), "us")

    removals = []
    for pod, hashes in last:
        tail = hashes[: SHARED_BLOCKS - 1 : -1]
        removed += len(tail)
        removals += [
            (pod, encode_batch(2.0, [BlockRemoved(tail[at : at + 64])])) for at in range(0, len(tail), 64)
        ]
    begin = time.process_time()
    for pod, payload in removals:
        feed(index, pod, payload, keys)
    row("tree.remove_blocks_s", removed / (time.process_time() - begin), "blocks/s")
    index.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
