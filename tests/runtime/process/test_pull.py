"""Two servers: what one has computed the other one pulls, and answers the same, also if the first one is killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.runtime_server import ServerProcess, eventually, running
from treeline_wire.headers import PAGES_FROM
from treeline_wire.security import CurveKeys

pytestmark = [pytest.mark.integration]

PROMPT = "one two three four five six seven eight nine ten and so on " * 40
HOST = ("--no-events", "--host-cache=16MiB")
LENDS = (*HOST, "--kv-transfer-port=0")


def address(server: ServerProcess) -> str:
    with server.client() as http:
        return f"127.0.0.1:{http.get('/server_info').json()['kv_transfer_port']}"


def ask(server: ServerProcess, prompt: str = PROMPT, pages_from: str | None = None) -> tuple[str, int, int]:
    """Return text, prompt tokens and cached tokens."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {} if pages_from is None else {PAGES_FROM: pages_from}
    with server.client() as http:
        reply = http.post("/v1/completions", json=body, headers=headers)
    reply.raise_for_status()
    found = reply.json()
    usage = found["usage"]
    return found["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def tiers(server: ServerProcess) -> dict[str, Any]:
    with server.client() as http:
        found: dict[str, Any] = http.get("/server_info").json()["internal_states"][0]["tiers"]
        return found


def test_a_server_answers_with_what_another_one_has_computed(model: Path) -> None:
    with running(model, *LENDS) as first, running(model, *HOST) as second:
        text, tokens, _ = ask(first)
        assert ask(second, pages_from=address(first)) == (text, tokens, (tokens - 1) // 16 * 16)
        assert tiers(first)["fingerprint"] == tiers(second)["fingerprint"]
        with second.metrics() as http:
            assert re.search(
                r'^treeline:load_back_tokens_total{medium="PEER",model_name="[^"]+"} [1-9]',
                http.get("/metrics").text,
                re.MULTILINE,
            )
        with first.metrics() as http:
            assert re.search(
                r'^treeline:kv_tier_sent_tokens_total{model_name="[^"]+"} [1-9]',
                http.get("/metrics").text,
                re.MULTILINE,
            )
        # it hangs: nothing arrives, and its prompts are computed
        scheduler = first.children()["scheduler"]
        psutil.Process(scheduler).suspend()
        where = address(first)
        other = "another prompt, " + PROMPT
        alone = ask(second, "yet " + other)
        assert alone[2] == 0
        text, tokens, cached = ask(second, other, pages_from=where)
        assert cached == 0
        psutil.Process(scheduler).send_signal(signal.SIGKILL)
        assert ask(second, "killed: " + other, pages_from=where)[2] == 0


def test_a_server_that_is_not_set_up_for_it_ignores_the_header(model: Path) -> None:
    with running(model, "--no-events") as server:
        with_it = ask(server, pages_from="127.0.0.1:1")
        assert with_it[2] == 0
    with running(model, *HOST) as server:
        for where in ("10.1.2.3:5", "nonsense", "127.0.0.1:1", "127.0.0.1:99999"):
            with server.admin() as http:
                eventually(lambda http=http: http.post("/flush_cache").status_code == 200)
            assert ask(server, pages_from=where) == with_it


def test_keys_open_the_port_to_the_network(model: Path, tmp_path: Path) -> None:
    CurveKeys.generate(tmp_path / "keys")
    keys = f"--curve-dir={tmp_path / 'keys'}"
    with running(model, *LENDS, keys, "--host=0.0.0.0") as first, running(model, *HOST, keys) as second:
        where = address(first)
        others = [one.address for found in psutil.net_if_addrs().values() for one in found if one.family == 2]
        own = next((one for one in others if not one.startswith("127.")), "127.0.0.1")
        with httpx.Client(base_url=first.url.replace("0.0.0.0", "127.0.0.1"), timeout=60) as http:
            http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).raise_for_status()
        _, tokens, cached = ask(second, pages_from=where.replace("127.0.0.1", own))
        assert cached == (tokens - 1) // 16 * 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-events", "--kv-transfer-port=0"], "--kv-transfer-port needs --host-cache"),
        ([*HOST, "--kv-transfer-port=0", "--dp-size=2"], "--kv-transfer-port: 0 is not the first of 2 ports"),
    ],
)
def test_what_does_not_work_is_refused_by_name(model: Path, flags: list[str], words: str) -> None:
    server = ServerProcess(model, *flags)
    assert server.wait() != 0
    assert any(words in line for line in server.log), server.log
