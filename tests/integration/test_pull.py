"""Two real runtimes behind a real picker and Envoy: one's pages reach the other one, and answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
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
