"""Clients notice little when a part of the system dies, restarts or leaves."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from openai import AsyncOpenAI
from support.prompts import text
from support.stack import Stack, until
from support.traffic import traffic
from treeline_wire import headers

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.deep]


def ask(stack: Stack, prompt: str, max_tokens: int = 2, model: str = "tiny"):
    return stack.http.post(
        f"{stack.url}/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": max_tokens}
    )


def served_by(stack: Stack, prompt: str) -> str:
    return stack.name_of(ask(stack, prompt).raise_for_status().headers[headers.ENDPOINT])


async def in_thread(function, *arguments):
    return await asyncio.to_thread(function, *arguments)


async def test_a_killed_runtime_takes_only_its_own_streams_with_it(stack: Stack, aclient: AsyncOpenAI):
    victim = "runtime-0"
    async with traffic(aclient) as running:
        await running.at_least(10)
        await in_thread(stack.end, victim, signal.SIGKILL)
        killed_at = time.monotonic()
        await running.at_least(20)
    lost = running.errors()
    assert all(fate.began <= killed_at for fate in lost), f"began after the kill: {lost}"
    assert all(fate.endpoint in (None, stack.address(victim)) for fate in lost), f"served elsewhere: {lost}"
    stack.start(victim)


def test_a_runtime_with_a_hanging_scheduler_gets_no_new_requests(stack: Stack):
    """Its other processes and its probes are healthy; only the scheduler's reports are missing."""
    victim = "runtime-0"
    scheduler = stack.child(victim, "scheduler_process")
    scheduler.suspend()
    try:
        until(lambda: stack.described(victim).get("silent"), "the picker misses its reports")
        assert {served_by(stack, text(50, seed=80 + index)) for index in range(6)} == {"runtime-1"}
    finally:
        scheduler.resume()
    until(lambda: not stack.described(victim).get("silent"), "it reports again")


async def test_a_restarted_runtime_is_not_credited_with_lost_blocks(stack: Stack):
    prompt = text(500, seed=41)
    holder = served_by(stack, prompt)
    until(lambda: stack.tree(holder), f"the tree knows blocks of {holder}")
    stack.end(holder, signal.SIGKILL)
    stack.start(holder)
    until(lambda: not stack.tree(holder), "the old credit is gone", 60, lambda: len(stack.tree(holder)))
    stack.agree(holder)
    again = ask(stack, prompt).raise_for_status()
    assert int(again.headers[headers.CACHED_TOKENS]) == 0


async def test_a_stopping_runtime_drops_nothing(stack: Stack, aclient: AsyncOpenAI):
    async with traffic(aclient) as running:
        await running.at_least(10)
        status = await in_thread(stack.end, "runtime-1", signal.SIGTERM)
        await running.at_least(10)
    assert status == 0, stack.log("runtime-1")
    assert running.errors() == []
    stack.start("runtime-1")


def decisions(stack: Stack) -> float:
    return sum(value for name, value in stack.metrics().items() if name.startswith("treeline_epp_decisions_total"))


async def test_a_restarted_picker_routes_at_once_by_cached_prefixes(stack: Stack):
    """Ready means that the picker knows the runtimes' caches again; Envoy reconnects within a second."""
    prompts = [text(300, seed=60 + index) for index in range(6)]
    holders = [served_by(stack, prompt) for prompt in prompts]
    stack.end("picker", signal.SIGTERM)
    stack.start("picker")
    until(lambda: ask(stack, "hello") and decisions(stack), "Envoy asks the picker again")
    assert [served_by(stack, prompt) for prompt in prompts] == holders


async def test_without_a_picker_requests_are_still_served(stack: Stack, aclient: AsyncOpenAI):
    async with traffic(aclient) as running:
        await running.at_least(5)
        await in_thread(stack.end, "picker", signal.SIGKILL)
        await running.at_least(20)
        unknown = ask(stack, "hello", model="alias")
        stack.start("picker")
        await running.at_least(5)
    assert running.errors() == []
    assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")
    assert unknown.json()["error"]["code"] == "picker_unavailable", "it may be a name that only a picker knows"
    until(lambda: ask(stack, "hello", model="alias").status_code == 404, "the picker answers 404")
