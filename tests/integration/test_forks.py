"""A prefix is sent ahead, and requests that extend it reach the runtime that holds it, through Envoy and picker."""

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

pytestmark = [pytest.mark.integration, pytest.mark.deep]

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
    """Keep both runtimes decoding and prefilling new prompts."""

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


async def test_children_of_a_prefix_reach_the_runtime_that_computed_it(stack: Stack) -> None:
    """The children are sent as soon as the parent is answered, while other requests come and go."""
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
    """A session is a preference: a runtime that is much slower for a moment loses it. So the test repeats with new
    sessions until no delay interfered; by chance sixteen sessions on two runtimes would stay together once in 2^48."""
    async with clients(stack) as http:

        async def ask(name: str, seed: int) -> str:
            body = generate(text(6, seed=seed), 8)
            answer = await http.post("/generate", json=body, headers={headers.SESSION_ID: name})
            return answer.raise_for_status().headers[headers.ENDPOINT]

        async def asked(attempt: int, turn: int) -> list[str]:
            seed = 10_000 + 1_000 * attempt + 100 * turn
            return await asyncio.gather(*(ask(f"session-{attempt}-{i}", seed + i) for i in range(16)))

        for attempt in range(30):
            homes = await asked(attempt, 0)
            turns = [await asked(attempt, turn) for turn in range(1, 4)]
            if len(set(homes)) == len(stack.runtimes) and all(places == homes for places in turns):
                return
        raise AssertionError(f"first {homes}, then {turns}")


def test_a_picker_without_sessions_routes_by_cached_prefixes(stack: Stack) -> None:
    prompt, named = text(400, seed=800), {headers.SESSION_ID: "kept"}

    def ask() -> httpx.Response:
        return stack.http.post(f"{stack.url}/generate", json=generate(prompt, 4), headers=named).raise_for_status()

    home = ask().headers[headers.ENDPOINT]
    stack.end("picker")
    stack.start("picker")

    def asked_again() -> bool:
        stack.http.post(f"{stack.url}/generate", json=generate("hello", 1)).raise_for_status()
        return any(value for name, value in stack.metrics().items() if name.startswith("treeline_epp_decisions_total"))

    until(asked_again, "Envoy asks the picker again")
    assert [ask().headers[headers.ENDPOINT] for _ in range(3)] == [home] * 3


def test_a_language_client_learns_the_templates_text_around_each_role(stack: Stack) -> None:
    def ask(path: str, **body: Any) -> Any:
        return stack.http.post(stack.url + path, json={"model": "tiny"} | body).raise_for_status().json()

    def rendered(*roles: str, prompted: bool) -> str:
        turns = [{"role": role, "content": f"@{role}@"} for role in roles]
        tokens = ask("/tokenize", messages=turns, add_generation_prompt=prompted)["tokens"]
        return str(ask("/detokenize", tokens=tokens, skip_special_tokens=False)["text"])

    turns = "".join(f"<|im_start|>{role}\n@{role}@<|im_end|>\n" for role in ("system", "user", "assistant", "user"))
    assert rendered("system", "user", "assistant", "user", prompted=False) == turns
    assert rendered("system", "user", "assistant", "user", prompted=True) == turns + "<|im_start|>assistant\n"
    tokens = ask("/tokenize", prompt="The capital of France is")["tokens"]
    assert ask("/detokenize", tokens=tokens)["text"] == "The capital of France is"
