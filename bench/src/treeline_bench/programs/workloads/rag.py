"""Retrieval in two steps, as DSPy's introduction has it: a query for the retriever, then an answer from what it found.

What is retrieved is given with the question, so that every run reads the same.
"""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

INSTRUCTION, EXAMPLES, CORPUS, PASSAGE, FOUND, QUESTION, QUERY, ANSWER = 60, 400, 12, 120, 3, 30, 24, 96


def make(data: Data, programs: int) -> Batch:
    searching, answering = (data.text(INSTRUCTION) + data.text(EXAMPLES) for _ in range(2))
    corpus = [data.text(PASSAGE) for _ in range(CORPUS)]
    query_tokens, answer_tokens = data.tokens(QUERY), data.tokens(ANSWER)

    @function
    def search(s: Any, question: str) -> None:
        s += searching + "\nQuestion:" + question + "\nQuery:" + gen("query", max_tokens=query_tokens, ignore_eos=True)

    @function
    def answer(s: Any, question: str, passages: list[str]) -> None:
        searched = search(question=question)
        s += answering + "".join(f"\nContext:{passage}" for passage in passages)
        s += "\nQuestion:" + question + "\nQuery:" + searched["query"]
        s += "\nReasoning:" + gen("answer", max_tokens=answer_tokens, ignore_eos=True)

    def one() -> dict[str, Any]:
        return {"question": data.text(QUESTION), "passages": data.rng.sample(corpus, FOUND)}

    return Batch(answer, [one() for _ in range(programs)])


WORKLOAD = Workload(
    "rag", "DSPy RAG", "a query of 24 tokens, then 96 from 3 passages of 120 behind examples of 400", make, programs=16
)
