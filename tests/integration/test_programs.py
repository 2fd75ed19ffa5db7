"""Unchanged programs of the frontend language run through Envoy and picker, and meet their cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.prompts import text
from support.stack import Stack
from treeline_lang import ProgramState, RuntimeEndpoint, Unsupported, assistant, function, gen, select, system, user

pytestmark = [pytest.mark.integration, pytest.mark.deep]

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo"}


@pytest.fixture
def backend(stack: Stack) -> Iterator[RuntimeEndpoint]:
    with RuntimeEndpoint(stack.url) as backend:
        yield backend


@function
def panel(s: ProgramState, prefix: str, count: int) -> Any:
    s += prefix
    branches = s.fork(count)
    branches += lambda i: " What is " + str(i) + " + 5?" + gen("answer", max_tokens=4)
    branches.join()


@function
def capital(s: ProgramState, rules: str, country: str) -> str:
    s += system(rules)
    s += user("What is the capital of " + country + "?")
    s += assistant(gen("answer", max_tokens=16))
    s += user("Which word is a city?")
    s += assistant(select("city", [CAPITALS[country], "seven"]))
    return s["answer"]


def test_branches_meet_their_shared_prefix_on_its_runtime(backend: RuntimeEndpoint) -> None:
    state = panel.run(prefix=text(1_000, seed=4_200), count=8, backend=backend, temperature=0)
    metas = state.get_meta_info("answer")
    shared = min(meta["prompt_tokens"] for meta in metas) - 32
    assert shared > 1_000
    assert min(meta["cached_tokens"] for meta in metas) >= shared


def test_a_batch_through_the_gateway_is_right_and_computes_shared_texts_at_most_once_a_runtime(
    stack: Stack, backend: RuntimeEndpoint
) -> None:
    rules = text(500, seed=4_300)
    items = [{"rules": rules, "country": country} for country in CAPITALS] * 4
    states = capital.run_batch(items, backend=backend, temperature=0, num_threads=8)
    for state, item in zip(states, items, strict=True):
        assert state.ret_value == f"The capital of {item['country']} is {CAPITALS[item['country']]}."
        assert state["city"] == CAPITALS[item["country"]]
    metas = [state.get_meta_info("answer") for state in states]
    computed = sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in metas)
    whole = min(meta["prompt_tokens"] for meta in metas)
    assert whole > 500
    assert computed < len(stack.runtimes) * whole + 64 * len(metas)


def test_administration_through_the_gateway_is_refused_with_a_message(backend: RuntimeEndpoint) -> None:
    with pytest.raises(Unsupported, match="cannot be flushed from here"):
        backend.flush_cache()
