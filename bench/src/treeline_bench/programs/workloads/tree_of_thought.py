"""Tree of thought on GSM8K: plan, execution, reflection and answer, each tried twice."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

QUESTION, ASK, THOUGHT, BRANCHES, STAGES = 200, 30, 256, 2, 4


def make(data: Data, programs: int) -> Batch:
    asks, tokens = [data.text(ASK) for _ in range(STAGES)], data.tokens(THOUGHT)

    @function
    def think(s: Any, question: str) -> int:
        s += "Question:" + question
        states = [s]
        for ask in asks:
            grown = []
            for state in states:
                state += "\nUser:" + ask + "\nAssistant:"
                forks = state.fork(BRANCHES)
                forks += gen("thought", max_tokens=tokens, ignore_eos=True)
                grown += list(forks)
            states = grown
        return sum(bool(state["thought"]) for state in states)

    return Batch(think, [{"question": data.text(QUESTION)} for _ in range(programs)])


WORKLOAD = Workload(
    "tree_of_thought", "Tree of thought", "2 branches at each of 4 stages: 30 × 256 tokens", make, programs=3
)
