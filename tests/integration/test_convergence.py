"""The picker's tree converges to the runtimes' caches, even if event batches are lost.

A hundred seeds run below HTTP (`tests/epp/core`); here a few go through everything: real runtimes, whose caches are so
small that they evict all the time, real sockets, a real picker, and one in fifty event batches lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
from support.lossy import lossy
from support.prompts import text
from support.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.deep]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two runtimes whose caches hold 2,048 tokens; the picker and Envoy are started by the tests."""
    stack = Stack(
        tmp_path_factory.mktemp("small"),
        runtime_args=("--max-total-tokens", "2048", "--chunked-prefill-size", "64"),
    )
    try:
        stack.start(*stack.runtimes)
        yield stack
    finally:
        stack.close()


def work(stack: Stack, seed: int, requests: int) -> None:
    """Send requests over prefixes that share beginnings; some return, and most cached blocks are evicted meanwhile."""
    choose = random.Random(seed)
    for _ in range(requests):
        prompt = text(60 + 40 * choose.randrange(4), seed=choose.randrange(6)) + text(20, seed=choose.randrange(1000))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        stack.http.post(f"{stack.url}/v1/completions", json=body).raise_for_status()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_tree_equals_every_cache_after_the_last_event(small: Stack, seed: int, tmp_path: Path):
    address = small.address("runtime-0")
    events_port = small.processes["runtime-0"].spec.ports["events-port"][1]
    picker = small.processes["picker"]
    original = picker.spec
    with lossy(address, events_port, one_in=50, seed=seed) as (proxied, forwarder):
        argv = tuple(word.replace(f"runtime-0={address}", f"runtime-0={proxied}") for word in original.argv)
        picker.spec = dataclasses.replace(original, argv=argv)
        try:
            small.start("picker", "envoy")
            small.agree("runtime-0")
            for round_ in itertools.count():
                work(small, seed=100 * seed + round_, requests=10)
                if forwarder.dropped >= 2 and all(map(small.tree, small.runtimes)):
                    break
            for name in small.runtimes:
                small.agree(name)
        finally:
            for name in ("envoy", "picker"):
                if small.processes[name].popen is not None:
                    small.end(name)
            picker.spec = original
