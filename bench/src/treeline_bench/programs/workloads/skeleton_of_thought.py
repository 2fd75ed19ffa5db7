"""Skeleton of thought: five short tips, each then expanded in a stream of its own."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

INSTRUCTION, EXAMPLES, TOPIC, TIPS, TIP, DETAIL = 100, 400, 10, 5, 24, 128


def make(data: Data, programs: int) -> Batch:
    instruction, examples = data.text(INSTRUCTION), data.text(EXAMPLES)
    tip_tokens, detail_tokens = data.tokens(TIP), data.tokens(DETAIL)

    @function
    def expand(s: Any, topic: str, tips: str, tip: str) -> None:
        s += examples + "\nTopic:" + topic + tips + "\nExpand:" + tip + "\nParagraph:"
        s += gen("detail", max_tokens=detail_tokens, stop="\n\n", ignore_eos=True)

    @function
    def advise(s: Any, topic: str) -> None:
        s += instruction + "\nTopic:" + topic + "\nTips:"
        for number in range(1, TIPS + 1):
            s += f"\n{number}. " + gen(f"tip{number}", max_tokens=tip_tokens, stop=[".", "\n"], ignore_eos=True)
        tips = s.text()[len(instruction) :]
        details = [expand(topic=topic, tips=tips, tip=s[f"tip{number}"]) for number in range(1, TIPS + 1)]
        for number, detail in enumerate(details, 1):
            s += f"\nTip {number}:" + detail["detail"]

    return Batch(advise, [{"topic": data.text(TOPIC)} for _ in range(programs)])


WORKLOAD = Workload(
    "skeleton_of_thought", "Skeleton of thought", "5 tips of 24 tokens, 128 about each", make, programs=8
)
