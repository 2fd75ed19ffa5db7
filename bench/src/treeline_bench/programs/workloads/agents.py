"""Generative agents: each one's events in their order, and for every event one of five questions about it."""

from __future__ import annotations

from typing import Any

from treeline_lang import function, gen

from treeline_bench.programs.data import Data
from treeline_bench.programs.workloads.base import Batch, Workload

TEMPLATES = ((300, 3), (500, 20), (250, 6), (600, 10), (700, 10))
"""Of what is asked: tokens before the event, and of the answer."""
EVENTS, EVENT = 5, 60


def make(data: Data, programs: int) -> Batch:
    templates = [(data.text(length), data.tokens(answer)) for length, answer in TEMPLATES]

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
        return {"events": [(data.rng.randrange(len(TEMPLATES)), data.text(EVENT)) for _ in range(EVENTS)]}

    return Batch(live, [one() for _ in range(programs)])


WORKLOAD = Workload(
    "agents",
    "Generative agents",
    "5 events of an agent, one after another, behind one of 5 templates of 250 to 700 tokens",
    make,
    programs=12,
)
