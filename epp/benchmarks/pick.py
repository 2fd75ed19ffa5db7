"""Measure one choice among many endpoints. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/pick.py [--picks 400]

The world: 1,000 and 5,000 endpoints of one model that report their load once a second, each with another queue, another
speed and caches of different sizes. Prompts are 150 blocks of 16 tokens (about 10 KB of text): a beginning of 50 blocks
that all endpoints hold, and a rest that every 20th holds. Picks come at 200 a second, so that the reports of 5 and 25
endpoints lie between two of them, which the pick takes in. `Picker.pick` is timed, in CPU time on one core: match,
costs, ranking; opening and closing the lease is not. The rows are the median, and the slowest of a hundred.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_wire.events import BlockStored
from treeline_wire.load import TreelineLoad

WIDTH = 16
SHARED, OWN = 50, 100
PROMPTS = 20
RATE = 200
SIZES = (1_000, 5_000)


class Vocabulary:
    """The bytes of each token id: the index needs nothing else of a tokenizer."""

    def __init__(self, rng: random.Random) -> None:
        self.token_bytes = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz ", k=4)) for _ in range(32_000)]


class Prompt:
    """The tokens of a prompt, the hashes of its blocks, and its key."""

    def __init__(self, rng: random.Random, words: Vocabulary, shared: Prompt | None) -> None:
        keep = SHARED if shared is not None else 0
        self.hashes = (shared.hashes[:keep] if shared else []) + [
            rng.getrandbits(64) for _ in range(SHARED + OWN - keep)
        ]
        count = len(self.hashes) * WIDTH - keep * WIDTH
        self.tokens = (shared.tokens[: keep * WIDTH] if shared else []) + rng.choices(range(32_000), k=count)
        self.key = b"".join(words.token_bytes[token] for token in self.tokens)

    def stored(self, blocks: int) -> BlockStored:
        return BlockStored(self.hashes[:blocks], None, self.tokens[: blocks * WIDTH], WIDTH)


class World:
    """A picker with endpoints and their cached blocks."""

    def __init__(self, count: int) -> None:
        rng = self.rng = random.Random(count)
        words = Vocabulary(rng)
        self.picker = Picker()
        first = Prompt(rng, words, None)
        self.prompts = [first, *(Prompt(rng, words, first) for _ in range(PROMPTS - 1))]
        self.names = [f"e{number}" for number in range(count)]
        for number, name in enumerate(self.names):
            spec = EndpointSpec(name, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000", models=("m",))
            pod = self.picker.add_endpoint(spec).pod
            self.report(name, 0.0)
            held = self.prompts[number % PROMPTS].stored(SHARED + (OWN if number < count // 20 * 20 else 0))
            self.picker.index.apply(pod, held, words)  # type: ignore[arg-type]

    def report(self, name: str, now: float) -> None:
        rng = self.rng
        load = TreelineLoad(
            page_size=WIDTH,
            running=rng.randrange(64),
            max_running=64,
            waiting_uncached_tokens=rng.choice((0, 0, 0, rng.randrange(5_000))),
            prefill_tokens_per_s=rng.uniform(9_000, 11_000),
            decode_step_ms=rng.uniform(5, 9),
            pages_total=10_000,
            pages_used=rng.randrange(9_990),
            pages_cached=9,
        )
        self.picker.on_load(name, load, now)

    def pick_ms(self, picks: int) -> list[float]:
        """Return the sorted CPU times of picks."""
        picker, now, turn = self.picker, 0.0, 0
        times = []
        for number in range(picks):
            now += 1 / RATE
            for _ in range(len(self.names) // RATE):
                self.report(self.names[turn % len(self.names)], now)
                turn += 1
            prompt = self.prompts[number % PROMPTS]
            request = Request(
                "id",
                model="m",
                key=prompt.key,
                prompt_tokens_estimate=len(prompt.tokens),
                max_output_tokens=64,
            )
            begin = time.thread_time_ns()
            decision = picker.pick(request, now)
            times.append((time.thread_time_ns() - begin) / 1e6)
            picker.close(picker.reserve(decision, now), now, Outcome.HEADERS)
            picker.on_tick(now)
        return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picks", type=int, default=400)
    picks = parser.parse_args().picks
    for count in SIZES:
        world = World(count)
        gc.collect()
        gc.freeze()
        world.pick_ms(20)
        times = world.pick_ms(picks)
        for metric, value in (
            (f"picker.pick_ms.{count}", statistics.median(times)),
            (f"picker.pick_p99_ms.{count}", times[len(times) * 99 // 100]),
        ):
            sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 4), "unit": "ms"}) + "\n")
            sys.stdout.flush()
        gc.unfreeze()


if __name__ == "__main__":
    main()
