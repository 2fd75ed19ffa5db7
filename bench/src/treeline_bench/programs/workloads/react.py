"""ReAct agents on HotpotQA: thought, action, observation, replayed, so that every run takes the same steps."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

INSTRUCTION, QUESTION, STEPS, THOUGHT, OBSERVATION = 1500, 30, 5, 60, 100


def make(data: Data, programs: int) -> Batch:
    instruction, thought_tokens = data.text(INSTRUCTION), data.tokens(THOUGHT)

    @function
    def react(s: Any, question: str, steps: list[tuple[str, str]]) -> None:
        s += instruction + "\nQuestion:" + question
        for number, (thought, observation) in enumerate(steps, 1):
            s += f"\nThought {number}:"
            forks = s.fork(1)
            forks += gen("thought", max_tokens=thought_tokens, stop="Observation", ignore_eos=True)
            forks.join()
            s += thought + f"\nObservation {number}:" + observation

    def one() -> dict[str, Any]:
        steps = [(data.text(THOUGHT), data.text(OBSERVATION)) for _ in range(STEPS)]
        return {"question": data.text(QUESTION), "steps": steps}

    return Batch(react, [one() for _ in range(programs)])


WORKLOAD = Workload(
    "react", "ReAct agents", "examples of 1,500 tokens, 5 steps of 60 + 100 tokens, replayed", make, programs=12
)
