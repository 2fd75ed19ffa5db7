"""MMLU: questions behind five examples of their subject, a token each."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

QUESTIONS = 10
"""Of a subject."""
EXAMPLES, EXAMPLE, QUESTION = 5, 300, 100


@function
def choose(s: Any, examples: str, question: str) -> None:
    s += examples + "\nQuestion:" + question + "\nAnswer:" + gen("answer", max_tokens=1)


def make(data: Data, programs: int) -> Batch:
    """Questions of all subjects in a shuffled order."""
    subjects = [
        "".join(f"\nQuestion:{data.text(EXAMPLE)}\nAnswer: {data.word()}" for _ in range(EXAMPLES))
        for _ in range(-(-programs // QUESTIONS))
    ]
    asked = [{"examples": subjects[i // QUESTIONS], "question": data.text(QUESTION)} for i in range(programs)]
    data.rng.shuffle(asked)
    return Batch(choose, asked)


WORKLOAD = Workload("mmlu", "MMLU", "5 examples of 300 tokens for each of the subjects, 1 token", make, programs=40)
