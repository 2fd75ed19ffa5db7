"""Conversations of four turns, with short answers and with long ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

TURNS, QUESTION, SHORT, LONG = 4, (256, 512), (4, 8), (256, 512)


@function
def talk(s: Any, turns: list[tuple[str, int]]) -> None:
    for number, (question, tokens) in enumerate(turns):
        s += "\nUser:" + question + "\nAssistant:" + gen(f"answer{number}", max_tokens=tokens, ignore_eos=True)


def make(data: Data, programs: int, answer: tuple[int, int]) -> Batch:
    def one() -> dict[str, Any]:
        return {"turns": [(data.between(*QUESTION), data.tokens(data.rng.randint(*answer))) for _ in range(TURNS)]}

    return Batch(talk, [one() for _ in range(programs)])


SHORT_ANSWERS = Workload(
    "multi_turn_short",
    "Multi-turn chat (short)",
    "4 turns of 256 to 512 tokens, answers of 4 to 8",
    partial(make, answer=SHORT),
    programs=12,
)
LONG_ANSWERS = Workload(
    "multi_turn_long",
    "Multi-turn chat (long)",
    "4 turns of 256 to 512 tokens, answers of 256 to 512",
    partial(make, answer=LONG),
    programs=6,
)
