"""Questions whose answers are known: the tiny model is so sure of each token that no rounding changes it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_WORDS: Final = ("river", "stone", "lantern", "copper", "meadow", "harbour", "orchard", "paper", "anchor", "bridge")


@dataclass(frozen=True)
class Known:
    """A question, after a document if there is one, and its only right answer."""

    question: str
    answer: str
    document: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.document}] if self.document else []
        return [*system, {"role": "user", "content": self.question}]


def code_word(seed: int) -> Known:
    """Return a long prompt with a short answer, a word somewhere in the document: 1,450 and 12 tokens."""
    chance = random.Random(seed)
    lines = [f"The {' '.join(chance.choices(_WORDS, k=2))} is near the {chance.choice(_WORDS)}" for _ in range(130)]
    answer = f"The code word is {chance.randrange(10_000, 100_000)}"
    lines.insert(chance.randrange(len(lines)), answer)
    return Known("What is the code word?", f"{answer}.", ". ".join(lines) + ".")


def count_to(end: int) -> Known:
    """Return a short prompt with a long answer: almost four tokens a number. It is sure of even ends from 50 to 58."""
    return Known(f"Count to {end}.", ", ".join(map(str, range(1, end + 1))))
