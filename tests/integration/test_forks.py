"""A prefix is sent ahead, and what is asked about it follows: through Envoy and picker to the runtime that holds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.prompts import text
from support.stack import Stack, until
from treeline_wire import headers

pytestmark = pytest.mark.integration

CHILDREN = 8
QUESTIONS = [f" What is {number} + {number + 7}?" for number in range(CHILDREN)]


def generate(prompt: str | list[int], tokens: int, **more: Any) -> dict[str, Any]:
    name = "text" if isinstance(prompt, str) else "input_ids"
    return {name: prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}} | more


@contextlib.asynccontextmanager
async def clients(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as http:
        yield http


@contextlib.asynccontextmanager
async def load(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """Both runtimes decode meanwhile, and have new prompts to prefill."""

    async def one(seed: int) -> None:
        for more in range(1_000):
            body = generate(text(30, seed=1_000 * seed + more), 40) | {"rid": f"load-{seed}-{more}"}
            (await http.post("/generate", json=body)).raise_for_status()

    busy = [asyncio.create_task(one(seed)) for seed in range(4)]
    try:
        yield
    finally:
        for task in busy:
            task.cancel()
        ended = await asyncio.gather(*busy, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def test_children_of_a_prefix_arrive_where_it_was_computed(stack: Stack) -> None:
    """They are asked in the moment in which the parent is answered, while other requests come and go."""
    async with clients(stack) as http, load(http):
        for seed in range(2):
            prefix = text(1_000, seed=600 + seed)
            parent = await http.post("/generate", json=generate(prefix, 0), headers={headers.FORK: str(CHILDREN)})
            asked = [http.post("/generate", json=generate(prefix + question, 4)) for question in QUESTIONS]
            children = await asyncio.gather(*asked)
            assert {one.headers[headers.ENDPOINT] for one in children} == {parent.headers[headers.ENDPOINT]}
            whole = parent.json()["meta_info"]["prompt_tokens"]
            assert whole > 1_500
            assert min(one.json()["meta_info"]["cached_tokens"] for one in children) > whole - 64


async def test_requests_of_a_session_stay_together_although_their_prompts_have_nothing_in_common(stack: Stack) -> None:
    async with clients(stack) as http:

        async def ask(session: int, turn: int) -> str:
            body = generate(text(6, seed=10_000 + 100 * session + turn), 2)
            answer = await http.post("/generate", json=body, headers={headers.SESSION_ID: f"session-{session}"})
            return answer.raise_for_status().headers[headers.ENDPOINT]

        homes = await asyncio.gather(*(ask(session, 0) for session in range(16)))
        assert set(homes) == {stack.address(name) for name in stack.runtimes}, "a burst is spread"
        for turn in range(1, 5):
            assert [await ask(session, turn) for session in range(16)] == homes


def test_a_picker_that_has_forgotten_all_sessions_goes_by_what_is_cached(stack: Stack) -> None:
    prompt, named = text(400, seed=800), {headers.SESSION_ID: "kept"}

    def ask() -> httpx.Response:
        return stack.http.post(f"{stack.url}/generate", json=generate(prompt, 4), headers=named).raise_for_status()

    home = ask().headers[headers.ENDPOINT]
    stack.end("picker")
    stack.start("picker")

    def asked_again() -> bool:
        stack.http.post(f"{stack.url}/generate", json=generate("hello", 1)).raise_for_status()
        return any(value for name, value in stack.metrics().items() if name.startswith("treeline_epp_decisions_total"))

    until(asked_again, "Envoy asks the picker again", 10)
    assert [ask().headers[headers.ENDPOINT] for _ in range(3)] == [home] * 3
