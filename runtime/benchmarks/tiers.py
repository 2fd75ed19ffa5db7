"""Measures what the host's tier of the cache is worth: conversations that take turns, more than the device holds.

    python runtime/benchmarks/tiers.py --shape tiny

Two engines with the same random weights have the same conversations, one with `host_cache`, one without. A turn adds
new tokens of the user and an answer. The device holds one and a half conversations, so that each has left it before its
next turn. Both engines get each request one after the other. On a CPU their answers must be equal; in bfloat16 a prompt
with a cached beginning is rounded elsewhere. The first two turns do not count: a page is stored at its second use.
DEVICE is cpu or cuda. Prints a row of JSON for each figure:

- `tiers.DEVICE.ttft_ratio`: median time to the first token with the tier ÷ without.
- `tiers.DEVICE.ttft_ms.host`, `tiers.DEVICE.ttft_ms.computed`: the two.
- `tiers.DEVICE.cached_share`: prompt tokens that were cached, with the tier.
- `tiers.DEVICE.equal_share`: answers that are equal; in bfloat16 a prompt of other parts is rounded otherwise.
- `tiers.cuda.decode_cost`: by how much longer running answers take while each of some prompts is loaded, than while
  prompts of the same lengths are found on the device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from engine import COMMON, SHAPES, report
from treeline_runtime import Engine, SamplingParams

UNCOUNTED = 2
"""Turns before pages are stored."""
RUNNING, TOKENS = 16, 512
"""Answers that run while pages are loaded, and their lengths."""


def ask(engine: Engine, prompt: list[int], answer: int) -> tuple[float, list[int], int]:
    """Returns milliseconds to the first token, the answer, and the cached prompt tokens."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=answer)
    began, stream = time.perf_counter(), engine.stream(prompt, params)
    outputs = [next(stream)]
    first = time.perf_counter() - began
    _, found = [*outputs, *stream][-1]
    assert len(found.token_ids) == answer
    return 1e3 * first, found.token_ids, found.cached_tokens


def running_s(engine: Engine, prompts: list[list[int]]) -> float:
    """Seconds of the running answers, while prompts are asked one after the other."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=TOKENS)
    seconds = list[float]()

    def run() -> None:
        began = time.perf_counter()
        engine.generate([[10 + i] * 16 for i in range(RUNNING)], params)
        seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    for prompt in prompts:
        ask(engine, prompt, 1)
    assert thread.is_alive(), "the answers ended before the prompts"
    thread.join()
    return seconds[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--quick", action="store_true", help="few short conversations: proves that it works")
    args = parser.parse_args()
    conversations, turns, new = (3, 4, 64) if args.quick else (6, 7, 256)
    first = new if args.quick else 1024 if args.shape == "tiny" else 16384
    answer, rng = 16, random.Random(0)
    longest = first + turns * (new + answer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape] | COMMON))
        room = longest * 3 // 2 + (RUNNING * (TOKENS + 16) if device == "cuda" else 0)
        settings = {"load_format": "dummy", "max_total_tokens": room, "max_running_requests": RUNNING + 4}
        with Engine(folder, **settings) as computing:
            token_bytes = computing.scheduler.limits.kv_bytes_per_token
            with Engine(folder, **settings, host_cache=token_bytes * longest * (conversations + 1)) as tiered:
                histories = [list[int]() for _ in range(conversations)]
                ours, theirs, equal = list[float](), list[float](), list[bool]()
                cached = asked = 0
                for turn in range(turns):
                    for i, history in enumerate(histories):
                        history += rng.choices(range(10, 4000), k=new if turn else first)
                        engines = (tiered, computing) if (turn + i) % 2 else (computing, tiered)
                        found = {engine: ask(engine, history, answer) for engine in engines}
                        equal.append(found[tiered][1] == found[computing][1])
                        assert equal[-1] or device == "cuda", "the answers differ"
                        if turn >= UNCOUNTED:
                            ours.append(found[tiered][0])
                            theirs.append(found[computing][0])
                            cached, asked = cached + found[tiered][2], asked + len(history)
                        history += found[tiered][1]
                shortest = min(map(len, histories))
                loaded = [history[:shortest] for history in histories]
                ratios = list[float]()
                for _ in range(3 if device == "cuda" else 0):
                    beside = running_s(tiered, loaded)
                    ratios.append(beside / running_s(tiered, loaded[-1:] * conversations))
    report(f"tiers.{device}.ttft_ms.host", statistics.median(ours))
    report(f"tiers.{device}.ttft_ms.computed", statistics.median(theirs))
    report(f"tiers.{device}.ttft_ratio", statistics.median(ours) / statistics.median(theirs))
    report(f"tiers.{device}.cached_share", cached / asked)
    report(f"tiers.{device}.equal_share", sum(equal) / len(equal))
    if ratios:
        report("tiers.cuda.decode_cost", statistics.median(ratios) - 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
