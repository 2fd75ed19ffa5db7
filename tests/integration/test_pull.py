"""Two real runtimes behind a real picker and Envoy: one's pages reach the other one, and answers stay the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, Stream, running
from support.stack import Stack, until
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Role
from treeline_wire.tiny_model import tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.deep]

IN_FLIGHT = 'treeline_epp_pool_in_flight_requests{pool="default"}'
PROMPT = " ".join(f"the word number {n}" for n in range(700))


@contextmanager
def two(folder: Path, *roles: Role, flags: tuple[str, ...] = ()) -> Iterator[tuple[Stack, list[ServerProcess]]]:
    """Run two servers, a and b, with these roles, behind Envoy."""
    with ExitStack() as stack:
        flags += ("--events-port=0", "--replay-port=0", "--load-port=0", "--host-cache=64MiB", "--kv-transfer-port=0")
        servers = [stack.enter_context(running(tiny_model(), "--served-model-name=tiny", *flags)) for _ in roles]
        engines = tuple(
            EndpointSpec(name, server.url.removeprefix("http://"), role=role)
            for name, server, role in zip("ab", servers, roles, strict=True)
        )
        path = Stack(folder, engines=engines)
        stack.callback(path.close)
        path.start("picker", "envoy")
        yield path, servers


def ask(url: str, **more: Any) -> tuple[str, int, int]:
    """Return text, prompt tokens and cached tokens."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def pulled_tokens(server: ServerProcess) -> int:
    with server.client() as http:
        tiers = http.get("/server_info").json()["internal_states"][0]["tiers"]
    return int(tiers["total_loaded_tokens"]["PEER"])


def apart(stack: Stack) -> float:
    """Return how many prompts the prefill engine has computed."""
    return stack.metrics().get('treeline_epp_prefills_total{outcome="headers"}', 0.0)


def test_a_pair_of_ours_computes_on_one_and_answers_on_the_other(tmp_path: Path) -> None:
    """A prompt is computed apart where it would delay answers."""
    with two(tmp_path, Role.PREFILL, Role.DECODE) as (stack, (prefill, decode)):
        for stream in [Stream(decode, 6000, ignore_eos=True) for _ in range(16)]:
            assert stream.began.wait(60)
        answers = list[tuple[str, str]]()

        def computed_apart() -> bool:
            prompt = f"{len(answers)} {PROMPT}"
            before = apart(stack)
            answers.append((prompt, ask(stack.url, prompt=prompt)[0]))
            return apart(stack) > before

        until(computed_apart, "a prompt is computed apart", state=stack.metrics)
        assert pulled_tokens(decode) > 0
        assert pulled_tokens(prefill) == 0
        with prefill.admin() as http:
            assert http.post("/flush_cache").status_code == 200
        assert ask(prefill.url, prompt=answers[-1][0])[0] == answers[-1][1], "the same as computed alone"


@contextmanager
def half_computed(stack: Stack, decode: ServerProcess) -> Iterator[tuple[str, Future[str]]]:
    """A prompt of which the decode engine has pages while the prefill engine computes the rest; and its answer."""
    for stream in [Stream(decode, 6000, ignore_eos=True) for _ in range(16)]:
        assert stream.began.wait(60)
    with ThreadPoolExecutor() as clients:
        for turn in range(20):
            prompt, before, ended = f"{turn} {PROMPT}", pulled_tokens(decode), apart(stack)
            answer = clients.submit(lambda prompt=prompt: ask(stack.url, prompt=prompt)[0])
            until(lambda a=answer, b=before: pulled_tokens(decode) > b or a.done(), "pages come, or it is whole")
            if pulled_tokens(decode) > before and apart(stack) == ended and not answer.done():
                yield prompt, answer
                return
    raise AssertionError(f"no prompt was seen while it travelled: {stack.metrics()}")


CHUNKS = ("--chunked-prefill-size=64",)


def test_the_pages_of_a_long_prompt_travel_while_it_is_computed(tmp_path: Path) -> None:
    with two(tmp_path, Role.PREFILL, Role.DECODE, flags=CHUNKS) as (stack, (prefill, decode)):
        with half_computed(stack, decode) as (prompt, answer):
            text = answer.result(120)
        assert ask(prefill.url, prompt=prompt)[0] == text


def test_a_prefill_engine_that_is_killed_in_the_middle_costs_nothing_but_time(tmp_path: Path) -> None:
    with two(tmp_path, Role.PREFILL, Role.DECODE, flags=CHUNKS) as (stack, (prefill, decode)):
        with half_computed(stack, decode) as (prompt, answer):
            for pid in (*prefill.children().values(), prefill.process.pid):
                os.kill(pid, signal.SIGKILL)
            text = answer.result(120)
        with decode.admin() as http:
            assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
            until(lambda: http.post("/flush_cache").status_code == 200, "nothing is left in the engine")
        until(lambda: stack.metrics()[IN_FLIGHT] == 0, "nothing is left in the picker", state=stack.metrics)
        assert ask(decode.url, prompt=prompt)[0] == text


def test_a_prefix_that_a_full_endpoint_holds_is_pulled_by_the_other_one(tmp_path: Path) -> None:
    with two(tmp_path, Role.BOTH, Role.BOTH, flags=("--max-running-requests=2",)) as (stack, (full, idle)):
        expected = ask(full.url)
        until(lambda: stack.metrics()["treeline_epp_tree_blocks"] > 200, "the picker knows it", state=stack.metrics)
        for _ in range(32):
            Stream(full, 6000, ignore_eos=True)
        until(lambda: stack.metrics()[IN_FLIGHT] == 32, "the picker knows that it is full", state=stack.metrics)
        text, tokens, cached = ask(stack.url)
        assert (text, tokens) == expected[:2]
        assert stack.metrics()['treeline_epp_forms_total{form="pull"}'] == 1, stack.metrics()
        assert pulled_tokens(idle) > 0
        assert cached > tokens // 2
