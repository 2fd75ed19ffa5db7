"""An essay judged by six criteria at once, and a score from what was found."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

INSTRUCTION, ARTICLE, CRITERION, BRANCHES, JUDGEMENT, SCORE = 100, 900, 40, 6, 256, 2


def make(data: Data, programs: int) -> Batch:
    instruction, criteria = data.text(INSTRUCTION), [data.text(CRITERION) for _ in range(BRANCHES)]
    tokens = data.tokens(JUDGEMENT)

    @function
    def judge(s: Any, article: str) -> None:
        s += instruction + "\nArticle:" + article
        forks = s.fork(BRANCHES)
        for fork, criterion in zip(forks, criteria, strict=True):
            fork += "\nJudge:" + criterion + "\n" + gen("judgement", max_tokens=tokens, stop="END", ignore_eos=True)
        forks.join()
        s += "".join(f"\nFound: {found}" for found in s["judgement"])
        s += "\nScore:" + gen("score", max_tokens=SCORE, ignore_eos=True)

    return Batch(judge, [{"article": data.text(ARTICLE)} for _ in range(programs)])


WORKLOAD = Workload(
    "judge", "LLM judge", "6 branches of 256 tokens about an article of 900, score of 2 from all", make, programs=6
)
