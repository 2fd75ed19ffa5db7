"""HellaSwag: the likeliest of four endings, behind twenty examples that all questions share."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, select

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

EXAMPLES, EXAMPLE, QUESTION, ENDINGS, ENDING = 20, 90, 60, 4, 20


def make(data: Data, programs: int) -> Batch:
    examples = "".join(f"\n{data.text(EXAMPLE)}." for _ in range(EXAMPLES))

    @function
    def complete(s: Any, beginning: str, endings: list[str]) -> None:
        s += examples + "\n" + beginning + select("ending", choices=endings)

    def one() -> dict[str, Any]:
        return {"beginning": data.text(QUESTION), "endings": [data.text(ENDING) for _ in range(ENDINGS)]}

    return Batch(complete, [one() for _ in range(programs)])


WORKLOAD = Workload("hellaswag", "HellaSwag", "20 examples of 90 tokens, select of 4 endings", make, programs=12)
