"""Measure tokenizing one more turn of a conversation, without sockets. Prints JSON rows {metric, value}.

    python runtime/benchmarks/tokenization.py [--model models/tiny] [--rounds 60]

Conversations in ChatML of 4,000, 40,000 and 400,000 characters, in turns of 500, that were tokenized before and have
another turn now. Each round tokenizes them as a runtime does (`CachedTokenizer`), and as a whole by the same tokenizer;
the ids are compared. A row is the ratio of the medians in wall time, `turn_us` the median of the longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer
from treeline_runtime.server.tokenization import CachedTokenizer

TURN = "the quick brown fox jumps over the lazy dog, and then again: "
TURN_CHARS = 500
SIZES = {"4k": 4_000, "40k": 40_000, "400k": 400_000}


def conversation(turns: int) -> str:
    """So many turns, of which no two are equal."""
    body = (TURN * TURN_CHARS)[: TURN_CHARS - 40]
    return "".join(f"<|im_start|>user\n{turn}: {body}<|im_end|>\n" for turn in range(turns))


def timed(call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    begin = time.perf_counter()
    ids = call()
    return time.perf_counter() - begin, ids


def row(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "models" / "tiny")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    spec = (args.model / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(spec)
    turn_s = 0.0
    for name, chars in SIZES.items():
        turns = chars // TURN_CHARS
        cached = CachedTokenizer(tokenizer, spec)
        again, whole = [], []
        for more in range(args.rounds):
            text = conversation(turns + more)
            seconds, ids = timed(lambda: cached.encode(text, add_special_tokens=True))  # noqa: B023 (called at once)
            again.append(seconds)
            seconds, expected = timed(lambda: tokenizer.encode_batch_fast([text])[0].ids)  # noqa: B023
            whole.append(seconds)
            assert ids == expected
        turn_s = statistics.median(again[1:])
        row(f"tokenization.speedup.{name}", statistics.median(whole[1:]) / turn_s)
    row("tokenization.turn_us", turn_s * 1e6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
