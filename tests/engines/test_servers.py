"""Two real servers of vLLM, or of SGLang, behind our Envoy and picker, in the order of one life: traffic, deaths. The
engine's own reports are the judge: its count of cached tokens, its tokenizer, its events as another subscriber counts
them. The tests share the servers, which take a minute to start; each leaves them as it found them.

What the engine says itself is the judge: its count of cached tokens, its own tokenizer, its events as another
subscriber counts them. The tests share the servers, which take a minute to start; each leaves them as it found them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import signal
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import ADAPTER, KINDS, EngineStack, running_engines
from support.prompts import text
from support.real_engines.hits import Measured
from support.real_engines.traffic import Exchange, Shape, Traffic
from support.stack import until
from treeline_bench.context import BenchmarkError
from treeline_bench.prompts import PromptMaker
from treeline_wire.tiny_model import tiny_model

pytestmark = [pytest.mark.engines, pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(900)]

SHAPE = Shape(groups=4, talks=3, turns=6, system=512, question=64, answer=16, concurrency=3)
CACHE_TOKENS = 6144
"""Of one server: fewer tokens than the conversations have at their end, so that some are evicted."""
LATE_TOKENS = {"vllm": 0, "sglang": SHAPE.answer + 16}
"""Tokens that a server may hold and not have announced when the next turn comes: SGLang announces an answer once it is
idle."""
SETTLED_S = 3.0
"""Seconds until published events are in the tree."""


@pytest.fixture(scope="module", params=list(KINDS))
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    try:
        KINDS[request.param].installation.interpreter()
    except BenchmarkError as error:
        pytest.skip(str(error))
    with running_engines(tmp_path_factory.mktemp(request.param), request.param, SHAPE, CACHE_TOKENS) as running:
        yield running


def talk(stack: EngineStack, seed: int, **shape: int) -> list[Exchange]:
    """Send new conversations through the gateway; every turn must be answered."""
    traffic = Traffic(dataclasses.replace(SHAPE, seed=seed, **shape), PromptMaker.of_model(tiny_model()), "tiny")
    exchanges = asyncio.run(traffic.run("127.0.0.1", stack.options.port))
    assert [exchange.record.error for exchange in exchanges] == [""] * traffic.shape.requests
    return exchanges


def measured(stack: EngineStack, exchanges: list[Exchange]) -> Measured:
    found = Measured()
    found.take(exchanges, stack.servers[stack.names[0]])
    return found


def agree(stack: EngineStack) -> None:
    for name in stack.names:
        stack.agree(name, SETTLED_S)


def test_the_picker_recognises_each_engine_and_its_load_reports(stack: EngineStack) -> None:
    for name in stack.names:
        seen = stack.described(name)
        assert (seen["engine"], seen["state"], seen["no_events"]) == (stack.kind.engine, "ready", None)
        assert seen["load"] == {"vllm": "scraped", "sglang": "pushed"}[stack.kind.engine]
        assert not seen["load_failing"]
        until(lambda: not stack.described(name)["silent"], "its load is heard", state=lambda: stack.described(name))  # noqa: B023


def test_conversations_go_to_their_cached_prefixes_and_the_tree_equals_the_engines_caches(stack: EngineStack) -> None:
    found = measured(stack, talk(stack, seed=1))
    assert found.cached >= 0.95 * found.possible
    agree(stack)
    assert all(stack.tree(name) for name in stack.names), "both have their share"


def test_evicted_blocks_leave_the_tree(stack: EngineStack) -> None:
    maker, rng = PromptMaker.of_model(tiny_model()), random.Random(7)
    for name in stack.names:
        held, before = stack.announced(name), stack.witnesses[name].evicted
        for _ in range(CACHE_TOKENS // 1024 + 1):
            stack.ask(name, maker.text(1024, rng))
        until(lambda: not held & stack.announced(name), "all of it is gone")  # noqa: B023
        assert stack.witnesses[name].evicted >= before + len(held)
    agree(stack)


def test_every_pick_has_a_reason_and_its_predicted_hit_equals_the_engines_report(stack: EngineStack) -> None:
    known = len(stack.decisions())
    exchanges = talk(stack, seed=2, groups=2, talks=2, turns=3, concurrency=1)
    decisions = until(
        lambda: found if len(found := stack.decisions()[known:]) == len(exchanges) else None, "all are in the log"
    )
    for exchange, decision in zip(exchanges, decisions, strict=True):
        costs = {name: terms["cost_s"] for name, terms in decision["terms"].items()}
        # The endpoint with more of the prompt keeps it while it is little worse; equals share at random.
        assert costs[decision["endpoint"]] <= 1.1 * min(costs.values()) + 0.005, decision
        found = decision["terms"][decision["endpoint"]].get("confirmed_tokens", 0)
        assert 0 <= exchange.record.cached_tokens - found <= LATE_TOKENS[stack.kind.engine], decision
    assert sum(exchange.record.cached_tokens for exchange in exchanges) > 0
    agree(stack)


LONG = text(120, seed=11)
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "Where is the harbour?"}]
CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
OF_ONE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "vllm": [("/v1/completions", {"model": ADAPTER, "prompt": f"adapted {LONG}"})],
    "sglang": [
        ("/generate", {"text": f"generate {LONG}", "sampling_params": {"max_new_tokens": 4}}),
        ("/generate", {"input_ids": [*range(500, 650)], "sampling_params": {"max_new_tokens": 4}}),
    ],
}
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": f"completions {LONG}"}),
    "token ids": ("/v1/completions", {"prompt": [500 + number % 900 for number in range(150)]}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "content in parts": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"one {LONG}"}, {"type": "text", "text": "two"}]}
            ]
        },
    ),
    "a tool call without content": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": f"tools {LONG}"},
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": "A harbour."},
                {"role": "user", "content": LONG},
            ]
        },
    ),
    "a prompt with a salt": ("/v1/completions", {"prompt": f"salted {LONG}", "cache_salt": "pepper"}),
    "responses": ("/v1/responses", {"input": f"responses {LONG}", "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": f"messages {LONG}"}], "max_tokens": 4}),
}


def reported(answer: dict[str, Any]) -> int:
    """Return the cached prompt tokens that an engine reports, in the form of any API."""
    usage = answer.get("usage") or answer["meta_info"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


def knock(stack: EngineStack, path: str, fields: dict[str, Any]) -> None:
    """Send the same request twice. For the second one, the picker must predict the hit that the engine reports."""

    def held() -> set[int]:
        return set().union(*(stack.announced(name) for name in stack.names))

    known, before = len(stack.decisions()), held()
    counted = {"max_tokens": 4} if path not in ("/v1/responses", "/generate") else {}
    for _ in range(2):
        answer = stack.http.post(f"{stack.url}{path}", json={"model": "tiny", **counted, **fields})
        assert answer.status_code == 200, answer.text
        until(lambda: held() - before, "the engine has announced the blocks")
        agree(stack)
    decision = until(lambda: found[1] if len(found := stack.decisions()[known:]) == 2 else None, "both are in the log")
    found = decision["terms"][decision["endpoint"]].get("confirmed_tokens", 0)
    assert found == reported(answer.json()) > 0, (decision, answer.json())


@pytest.mark.parametrize("door", DOORS)
def test_the_picker_predicts_hits_through_every_common_api(stack: EngineStack, door: str) -> None:
    knock(stack, *DOORS[door])


def test_the_picker_predicts_hits_through_apis_of_one_engine(stack: EngineStack) -> None:
    for path, fields in OF_ONE[stack.kind.engine]:
        knock(stack, path, fields)


def test_an_adapter_or_a_salt_keeps_a_prompt_apart(stack: EngineStack) -> None:
    apart = [{"model": "tiny"}, {"cache_salt": "red"}, {"cache_salt": "blue"}]
    apart += [{"model": ADAPTER}] if stack.kind.engine == "vllm" else []
    for own in apart:
        body = {"model": "tiny", "prompt": f"apart {LONG}", "max_tokens": 1, **own}
        known = len(stack.decisions())
        answer = stack.http.post(f"{stack.url}/v1/completions", json=body).raise_for_status().json()
        decision = until(lambda: stack.decisions()[known:], "it is in the log")[0]  # noqa: B023
        assert decision["cached_tokens"] == reported(answer) == 0


def test_a_restarted_picker_learns_missed_events_by_replay(stack: EngineStack) -> None:
    held = {name: stack.announced(name) for name in stack.names}
    stack.end("picker")
    for name in stack.names:
        stack.ask(name, f"while nobody listened, {name} was told: " + "one two three four " * 40)
    stack.start("picker")
    until(stack.followed, "the picker follows both engines", state=lambda: stack.log("picker"))
    agree(stack)
    assert all(stack.announced(name) != held[name] for name in stack.names)


def test_a_cache_that_is_emptied_is_forgotten(stack: EngineStack) -> None:
    talk(stack, seed=3, groups=2, talks=1, turns=1)
    for name, server in stack.servers.items():
        held = stack.announced(name)
        server.forget()
        until(lambda: not held & stack.announced(name), "it has said so")  # noqa: B023
    agree(stack)


def test_a_dead_server_gets_no_requests_and_returns_without_credited_blocks(stack: EngineStack) -> None:
    dies, stays = stack.names
    talk(stack, seed=4)
    held = stack.announced(dies)
    assert held
    stack.end(dies, signal.SIGKILL)
    until(lambda: stack.described(dies)["state"] != "ready", "the picker notices")
    known = len(stack.decisions())
    talk(stack, seed=4, turns=1, concurrency=1)
    assert {decision["endpoint"] for decision in stack.decisions()[known:]} == {stays}

    stack.start(dies, timeout_s=stack.kind.start_s)
    until(lambda: stack.described(dies)["state"] == "ready", "it is picked again")
    until(stack.followed, "the picker follows both engines", state=lambda: stack.log("picker"))
    assert not stack.tree(dies), ("nothing of the old process is credited to the new one", stack.subscriptions())

    found = measured(stack, talk(stack, seed=5))
    # For its first seconds an engine that was gone is not taken at its word: what it holds is predicted then.
    assert found.cached >= 0.8 * found.possible
    agree(stack)
    assert stack.tree(dies), "it has learnt again"
    assert not held & stack.tree(dies)


def test_events_are_in_the_tree_within_milliseconds(stack: EngineStack) -> None:
    stack.end("picker")
    delays = [json.loads(line)["delay_ms"] for line in stack.times.read_text().splitlines()]
    stack.start("picker")
    until(stack.followed, "the picker follows both engines", state=lambda: stack.log("picker"))
    assert len(delays) > 20
    assert statistics.median(delays) < 20


def test_a_draining_server_finishes_its_requests_and_gets_no_new_ones(stack: EngineStack) -> None:
    if stack.kind.engine == "vllm":
        pytest.skip("tried with SGLang alone, whose page says so while it finishes")
    leaves, stays = stack.names
    body = {"model": "tiny", "prompt": "a long story", "max_tokens": 800, "ignore_eos": True, "stream": True}
    with stack.http.stream("POST", f"{stack.servers[leaves].url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        stack.send(leaves, signal.SIGTERM)
        until(lambda: stack.described(leaves)["state"] != "ready", "the picker notices")
        assert stack.http.get(f"{stack.servers[leaves].url}/health").status_code == 503
        known = len(stack.decisions())
        talk(stack, seed=6, groups=1, talks=2, turns=2, concurrency=1)
        assert {decision["endpoint"] for decision in stack.decisions()[known:]} == {stays}
        assert list(lines)[-2:] == ["data: [DONE]", ""], "the long answer has come to its end"
    assert stack.processes[leaves].popen is not None
    stack.processes[leaves].popen.wait(60)
