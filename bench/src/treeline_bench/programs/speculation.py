"""Extracts three fields of a text from a black box: calls with and without API speculation.

The black box is our server, by OpenAI's API, as chats and completions. Results must be equal; calls are counted as
sent, failed tries included.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from treeline_lang import OpenAI, ProgramError, assistant, function, gen, user
from treeline_lang.backends.base import Call, Completion
from treeline_lang.sampling import Sampling
from treeline_lang.transcript import Prompt

from treeline_bench.context import BenchmarkError

NAME = "extraction"
FORMS = ("chats", "completions")
SPECULATED_TOKENS = 48
TEXTS = 16
NAMES, CITIES = ("Ada", "Tom", "Mia", "Ben"), ("London", "Paris", "Rome", "Oslo")


@dataclass(frozen=True)
class Person:
    name: str
    age: int
    city: str

    @property
    def text(self) -> str:
        return f"Give me a JSON object with name {self.name}, age {self.age} and city {self.city}."

    @property
    def json(self) -> str:
        return f'{{"name": "{self.name}", "age": {self.age}, "city": "{self.city}"}}'


def _extract(s: Any, example: Person, text: str) -> tuple[str, str, str]:
    s += user(example.text) + assistant(example.json)
    s += user(text)
    s += assistant(
        '{"name": "'
        + gen("name", stop='"', max_tokens=16)
        + '", "age": '
        + gen("age", stop=",", max_tokens=8)
        + ', "city": "'
        + gen("city", stop='"', max_tokens=16)
        + '"}'
    )
    return s["name"], s["age"], s["city"]


plain = function(_extract)
speculating = function(num_api_spec_tokens=SPECULATED_TOKENS)(_extract)


class Counted(OpenAI):
    """Counts its calls."""

    calls = 0

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        self.calls += 1
        return await super().generate(prompt, sampling, call)


def people(count: int, seed: int) -> list[Person]:
    rng = random.Random(seed)
    return [Person(rng.choice(NAMES), rng.randint(2, 99), rng.choice(CITIES)) for _ in range(count)]


def call_ratios(url: str, model: str, seed: int) -> dict[str, float]:
    """Calls without speculation divided by those with it, for each form. Raises BenchmarkError if results differ, or
    the server fails."""
    return {form: _ratio(url, model, form, people(TEXTS + 1, seed)) for form in FORMS}


def _ratio(url: str, model: str, form: str, known: list[Person]) -> float:
    found, calls = {}, {}
    for program in (plain, speculating):
        completions = form == "completions"
        template = "chatml" if completions else None
        with Counted(f"{url}/v1", model=model, completions=completions, chat_template=template) as backend:
            try:
                found[program] = [
                    program.run(example=known[0], text=one.text, backend=backend, temperature=0.0).ret_value
                    for one in known[1:]
                ]
            except ProgramError as error:
                raise BenchmarkError(f"{form}: {error}") from error
            calls[program] = backend.calls
    if found[plain] != found[speculating]:
        raise BenchmarkError(f"{form}: speculation changes what is extracted")
    return calls[plain] / calls[speculating]
