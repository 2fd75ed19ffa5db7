"""One server with two engines (`--dp-size 2`): to the picker each rank is an endpoint, and its prompts return to it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.ports import free_base
from support.prompts import text
from support.stack import Stack, running_stack, until
from treeline_wire import headers

pytestmark = pytest.mark.integration

PAGE = 16
"""Tokens of a block."""
ENDPOINTS = ["runtime-0", "runtime-0/1"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    ports = {name: free_base(2) for name in ("events_port", "replay_port", "load_port")}
    with running_stack(tmp_path_factory.mktemp("stack"), replicas=1, runtime_args=("--dp-size", "2"), **ports) as made:
        until(lambda: followed(made) == ["live", "live"], "both ranks' events are followed")
        yield made


def followed(stack: Stack) -> list[str]:
    return [publisher["state"] for publisher in stack.described("runtime-0")["publishers"]]


def computed(stack: Stack) -> list[int]:
    """Return the prompt tokens that each rank has computed."""
    page = stack.http.get(f"http://{stack.address('runtime-0')}/v1/loads").json()
    return [load["total_prefill_uncached_tokens"] for load in page["loads"]]


def complete(stack: Stack, prompt: str, **sent: str) -> int:
    """Send a prompt through the gateway; return its tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = stack.http.post(f"{stack.url}/v1/completions", json=body, headers=sent)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


def ask(stack: Stack, prompt: str, **sent: str) -> list[int]:
    """Send a prompt through the gateway; return the tokens that each rank computed for it."""
    before = computed(stack)
    complete(stack, prompt, **sent)
    return [after - then for after, then in zip(computed(stack), before, strict=True)]


def held(stack: Stack) -> list[int]:
    """Return how many blocks the picker believes each rank holds."""
    return [len(stack.tree(name)) for name in ENDPOINTS]


def test_a_repeated_prompt_returns_to_the_rank_that_holds_it(stack: Stack) -> None:
    prompts, before = [text(300, seed) for seed in range(6)], sum(held(stack))
    with ThreadPoolExecutor(len(prompts)) as threads:  # at once, as idle ranks may not look equally fast
        lengths = threads.map(lambda prompt: complete(stack, prompt), prompts)
        blocks = before + sum(length // PAGE for length in lengths)
    until(lambda: sum(held(stack)) >= blocks, "the ranks' events have come")
    homes = []
    for prompt in prompts:
        tokens = ask(stack, prompt)
        assert tokens.count(0) == 1, "it ran at one rank"
        homes.append(0 if tokens[0] else 1)
    assert set(homes) == {0, 1}, "neither rank has all of them"
    for prompt, home in zip(prompts, homes, strict=True):
        tokens = ask(stack, prompt, **{headers.RANK: str(1 - home)})
        assert tokens[1 - home] == 0, "a client does not choose the rank"
        assert 0 < tokens[home] < 64, "most of it was cached"


def test_ranks_are_endpoints_to_the_picker_and_one_to_the_operator(stack: Stack) -> None:
    base = f"http://127.0.0.1:{stack.options.picker_admin_port}"
    assert stack.http.get(f"{base}/debug/tree").json()["pods"] == ENDPOINTS
    (pool,) = stack.http.get(f"{base}/endpoints").json()["pools"].values()
    (endpoint,) = pool["endpoints"]
    assert (endpoint["name"], endpoint["ready"], endpoint["in_flight"]) == ("runtime-0", True, 0)
    metrics = stack.metrics()
    assert metrics['treeline_epp_pool_ready_endpoints{pool="default"}'] == 1
    for name in ENDPOINTS:
        assert metrics[f'treeline_epp_decisions_total{{endpoint="{name}"}}'] > 0
