"""A server whose cache audits itself: right, then wrong, then flushed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, eventually, running
from support.wrong_pages import Spoil

pytestmark = pytest.mark.integration

INSTRUCTION = "one two three four five six seven eight nine ten " * 4


@pytest.fixture(params=[pytest.param((), id="alone"), pytest.param(("--tp-size=2",), marks=pytest.mark.deep, id="tp")])
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    spoil = f"--logit-processor=spoil={Spoil.__module__}:{Spoil.__name__}"
    flags = ("--max-total-tokens=2048", "--cache-audit=1", spoil)
    with running(model, "--device=cpu", *flags, *request.param) as server:
        yield server


def ask(http: httpx.Client, ending: str, **more: Any) -> tuple[str, int]:
    """Return the answer and the number of its cached prompt tokens."""
    body = {"prompt": INSTRUCTION + ending, "max_tokens": 4, "temperature": 0, **more}
    reply = http.post("/v1/completions", json=body)
    reply.raise_for_status()
    found = reply.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_server_finds_that_its_cache_lies_and_says_so(server: ServerProcess) -> None:
    with server.client() as http, server.metrics() as metrics, server.admin() as admin:

        def told() -> list[str]:
            lines = metrics.get("/metrics").text.splitlines()
            return [line.partition(":")[2] for line in lines if line.startswith("treeline:cache_") and "source" in line]

        def count(name: str, value: int) -> bool:
            return f'{name}{{model_name="random",source="tree"}} {value}.0' in told()

        right, cached = ask(http, "a")
        assert cached == 0
        again, cached = ask(http, "a")
        assert again == right
        assert cached > 0
        eventually(lambda: count("cache_audits_total", 1), 60, "the second request is audited")
        assert count("cache_audit_divergence_total", 0)
        assert count("cache_source_off", 0)
        assert http.get("/health").json() == {"status": "ready"}

        ask(http, "b", custom_logit_processor="spoil", max_tokens=1)
        assert ask(http, "a")[1] > 0
        eventually(lambda: count("cache_audit_divergence_total", 1), 60, "the lie is found")
        assert count("cache_source_off", 1)
        server.wait_for_log(r"cache audit: request '\S+' got another answer")
        assert ask(http, "a") == (right, 0)
        health = http.get("/health")
        assert health.status_code == 200
        assert "cached tokens changed an answer" in health.json()["warning"]
        info = http.get("/server_info").json()
        assert info["cache_sources_off"] == ["tree"]
        assert info["internal_states"][0]["audits"]["tree"]["diverged"] == 1
        assert server.idle()

        admin.post("/flush_cache").raise_for_status()
        assert [ask(http, "a") for _ in range(2)] == [(right, 0), (right, cached)]
        eventually(lambda: http.get("/health").json() == {"status": "ready"}, 60, "the cache is on again")
