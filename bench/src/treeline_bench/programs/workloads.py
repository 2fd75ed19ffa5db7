"""The eleven workloads of SGLang's paper (Zheng et al., 2024, section 6.1), as programs on synthetic texts.

Texts are meaningless but have the right lengths, and are the same for the same seed. Lengths in the functions are in
tokens, before scaling.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from treeline_lang import function, gen, select

from treeline_bench.prompts import PromptMaker


class Data:
    """Makes a workload's data. Lengths are in tokens of the model, multiplied by `scale`."""

    def __init__(self, maker: PromptMaker, seed: str, scale: float) -> None:
        self._maker = maker
        self.rng = random.Random(seed)
        self._scale = scale

    def tokens(self, full: int) -> int:
        """A scaled length, at least 1."""
        return max(round(full * self._scale), 1)

    def text(self, tokens: int) -> str:
        """Words of so many tokens before scaling, each with a leading space."""
        return self._maker.text(self.tokens(tokens), self.rng)

    def between(self, shortest: int, longest: int) -> str:
        """The same with a random length."""
        return self.text(self.rng.randint(shortest, longest))

    def word(self) -> str:
        """A word without space."""
        return self.rng.choice(self._maker.words).strip()


@dataclass(frozen=True)
class Batch:
    """A program and its arguments for each run."""

    program: Any
    arguments: list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    shape: str
    """Description: prompts, answers and branches before scaling, in tokens."""
    make: Callable[[Data, int], Batch]
    """(data, number of programs) → what to run; the same for the same seed."""
    programs: int
    """Default number."""


@function
def choose(s: Any, examples: str, question: str) -> None:
    s += examples + "\nQuestion:" + question + "\nAnswer:" + gen("answer", max_tokens=1)


def _mmlu(data: Data, programs: int) -> Batch:
    """MMLU: questions after five examples of their subject, one token each."""
    subjects = [
        "".join(f"\nQuestion:{data.text(300)}\nAnswer: {data.word()}" for _ in range(5))
        for _ in range(-(-programs // 10))
    ]
    asked = [{"examples": subjects[i // 10], "question": data.text(100)} for i in range(programs)]
    data.rng.shuffle(asked)
    return Batch(choose, asked)


def _hellaswag(data: Data, programs: int) -> Batch:
    """HellaSwag: the most likely of four endings, after twenty examples that all questions share."""
    examples = "".join(f"\n{data.text(90)}." for _ in range(20))

    @function
    def complete(s: Any, beginning: str, endings: list[str]) -> None:
        s += examples + "\n" + beginning + select("ending", choices=endings)

    def one() -> dict[str, Any]:
        return {"beginning": data.text(60), "endings": [data.text(20) for _ in range(4)]}

    return Batch(complete, [one() for _ in range(programs)])


def _react(data: Data, programs: int) -> Batch:
    """ReAct agents on HotpotQA: thought, action, observation; replayed, so that runs are equal."""
    instruction, thought_tokens = data.text(1500), data.tokens(60)

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
        steps = [(data.text(60), data.text(100)) for _ in range(5)]
        return {"question": data.text(30), "steps": steps}

    return Batch(react, [one() for _ in range(programs)])


def _agents(data: Data, programs: int) -> Batch:
    """Generative agents: each one's events in order, with one of five questions about each."""
    # for each kind of question: tokens before the event, tokens of the answer
    kinds = ((300, 3), (500, 20), (250, 6), (600, 10), (700, 10))
    templates = [(data.text(length), data.tokens(answer)) for length, answer in kinds]

    @function
    def ask(s: Any, template: str, event: str, tokens: int) -> None:
        s += template + "\nEvent:" + event + "\nAnswer:" + gen("answer", max_tokens=tokens, ignore_eos=True)

    @function
    def live(s: Any, events: list[tuple[int, str]]) -> None:
        for kind, event in events:
            template, tokens = templates[kind]
            answered = ask(template=template, event=event, tokens=tokens)
            s += "\n" + answered["answer"]

    def one() -> dict[str, Any]:
        return {"events": [(data.rng.randrange(len(kinds)), data.text(60)) for _ in range(5)]}

    return Batch(live, [one() for _ in range(programs)])


def _tree_of_thought(data: Data, programs: int) -> Batch:
    """Tree of thought on GSM8K: plan, execution, reflection and answer, each tried twice."""
    asks, tokens = [data.text(30) for _ in range(4)], data.tokens(256)

    @function
    def think(s: Any, question: str) -> int:
        s += "Question:" + question
        states = [s]
        for ask in asks:
            grown = []
            for state in states:
                state += "\nUser:" + ask + "\nAssistant:"
                forks = state.fork(2)
                forks += gen("thought", max_tokens=tokens, ignore_eos=True)
                grown += list(forks)
            states = grown
        return sum(bool(state["thought"]) for state in states)

    return Batch(think, [{"question": data.text(200)} for _ in range(programs)])


def _skeleton_of_thought(data: Data, programs: int) -> Batch:
    """Skeleton of thought: five short tips, each then expanded in its own stream."""
    instruction, examples = data.text(100), data.text(400)
    tip_tokens, detail_tokens = data.tokens(24), data.tokens(128)

    @function
    def expand(s: Any, topic: str, tips: str, tip: str) -> None:
        s += examples + "\nTopic:" + topic + tips + "\nExpand:" + tip + "\nParagraph:"
        s += gen("detail", max_tokens=detail_tokens, stop="\n\n", ignore_eos=True)

    @function
    def advise(s: Any, topic: str) -> None:
        s += instruction + "\nTopic:" + topic + "\nTips:"
        for number in range(1, 5 + 1):
            s += f"\n{number}. " + gen(f"tip{number}", max_tokens=tip_tokens, stop=[".", "\n"], ignore_eos=True)
        tips = s.text()[len(instruction) :]
        details = [expand(topic=topic, tips=tips, tip=s[f"tip{number}"]) for number in range(1, 5 + 1)]
        for number, detail in enumerate(details, 1):
            s += f"\nTip {number}:" + detail["detail"]

    return Batch(advise, [{"topic": data.text(10)} for _ in range(programs)])


def _judge(data: Data, programs: int) -> Batch:
    """An essay judged by six criteria in parallel, and a score from these."""
    instruction, criteria = data.text(100), [data.text(40) for _ in range(6)]
    tokens = data.tokens(256)

    @function
    def judge(s: Any, article: str) -> None:
        s += instruction + "\nArticle:" + article
        forks = s.fork(6)
        for fork, criterion in zip(forks, criteria, strict=True):
            fork += "\nJudge:" + criterion + "\n" + gen("judgement", max_tokens=tokens, stop="END", ignore_eos=True)
        forks.join()
        s += "".join(f"\nFound: {found}" for found in s["judgement"])
        s += "\nScore:" + gen("score", max_tokens=2, ignore_eos=True)

    return Batch(judge, [{"article": data.text(900)} for _ in range(programs)])


def _json_decode(data: Data, programs: int) -> Batch:
    """Five fields of a JSON object about a page, each with a regular expression."""
    # Words alone can follow each: the vocabulary of a model with random weights has nothing else
    words, quantity, items = "[A-Za-z ]{1,200}", "[-0-9A-Za-z. ]{1,200}", "[A-Za-z ]{1,60}(, [A-Za-z ]{1,60}){0,20}"
    short, long = data.tokens(8), data.tokens(24)

    @function
    def extract(s: Any, page: str) -> None:
        s += "Extract what the page says about the city.\nPage begin." + page + "\nPage end.\n"
        s += '{\n  "name": "' + gen("name", max_tokens=short, regex=words) + '",\n'
        s += '  "country": "' + gen("country", max_tokens=short, regex=words) + '",\n'
        s += '  "latitude": "' + gen("latitude", max_tokens=short, regex=quantity) + '",\n'
        s += '  "population": "' + gen("population", max_tokens=short, regex=quantity) + '",\n'
        s += '  "landmarks": "' + gen("landmarks", max_tokens=long, regex=items) + '"\n}\n'

    return Batch(extract, [{"page": data.text(1000)} for _ in range(programs)])


@function
def talk(s: Any, turns: list[tuple[str, int]]) -> None:
    for number, (question, tokens) in enumerate(turns):
        s += "\nUser:" + question + "\nAssistant:" + gen(f"answer{number}", max_tokens=tokens, ignore_eos=True)


def _multi_turn(data: Data, programs: int, answer: tuple[int, int]) -> Batch:
    """Conversations of four turns, with short and with long answers."""

    def one() -> dict[str, Any]:
        return {"turns": [(data.between(256, 512), data.tokens(data.rng.randint(*answer))) for _ in range(4)]}

    return Batch(talk, [one() for _ in range(programs)])


def _rag(data: Data, programs: int) -> Batch:
    """Retrieval in two steps, as in DSPy's introduction: a query for the retriever, then an answer from its results,
    which are given with the question, so that runs are equal.
    """
    searching, answering = (data.text(60) + data.text(400) for _ in range(2))
    corpus = [data.text(120) for _ in range(12)]
    query_tokens, answer_tokens = data.tokens(24), data.tokens(96)

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
        return {"question": data.text(30), "passages": data.rng.sample(corpus, 3)}

    return Batch(answer, [one() for _ in range(programs)])


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mmlu", "MMLU", "5 examples of 300 tokens for each of the subjects, 1 token", _mmlu, programs=40),
        Workload("hellaswag", "HellaSwag", "20 examples of 90 tokens, select of 4 endings", _hellaswag, programs=12),
        Workload(
            "react",
            "ReAct agents",
            "examples of 1,500 tokens, 5 steps of 60 + 100 tokens, replayed",
            _react,
            programs=12,
        ),
        Workload(
            "agents",
            "Generative agents",
            "5 events of an agent, one after another, behind one of 5 templates of 250 to 700 tokens",
            _agents,
            programs=12,
        ),
        Workload(
            "tree_of_thought",
            "Tree of thought",
            "2 branches at each of 4 stages: 30 × 256 tokens",
            _tree_of_thought,
            programs=3,
        ),
        Workload(
            "skeleton_of_thought",
            "Skeleton of thought",
            "5 tips of 24 tokens, 128 about each",
            _skeleton_of_thought,
            programs=8,
        ),
        Workload(
            "judge",
            "LLM judge",
            "6 branches of 256 tokens about an article of 900, score of 2 from all",
            _judge,
            programs=6,
        ),
        Workload(
            "json_decode",
            "JSON decode",
            "5 fields by regular expression, of 8 to 24 tokens, about 1,000",
            _json_decode,
            programs=10,
        ),
        Workload(
            "multi_turn_short",
            "Multi-turn chat (short)",
            "4 turns of 256 to 512 tokens, answers of 4 to 8",
            partial(_multi_turn, answer=(4, 8)),
            programs=12,
        ),
        Workload(
            "multi_turn_long",
            "Multi-turn chat (long)",
            "4 turns of 256 to 512 tokens, answers of 256 to 512",
            partial(_multi_turn, answer=(256, 512)),
            programs=6,
        ),
        Workload(
            "rag",
            "DSPy RAG",
            "a query of 24 tokens, then 96 from 3 passages of 120 behind examples of 400",
            _rag,
            programs=16,
        ),
    )
}
