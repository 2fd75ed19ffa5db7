"""A server whose device holds little: cached prompts come back from the host, and after a restart from the disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, eventually, running

pytestmark = [pytest.mark.integration]

PROMPTS = [f"{i} " + "one two three four five six seven eight nine ten and so on " * 12 for i in range(6)]
SMALL = ("--max-total-tokens=512", "--no-events")
TIERS = (*SMALL, "--host-cache=4MiB")


def answers(server: ServerProcess) -> list[tuple[str, int, int]]:
    """Return text, prompt tokens and cached tokens of each prompt, asked one after another."""
    with server.client() as http:
        return [answer(http, prompt) for prompt in PROMPTS]


def answer(http: httpx.Client, prompt: str) -> tuple[str, int, int]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = http.post("/v1/completions", json=body)
    reply.raise_for_status()
    found = reply.json()
    usage = found["usage"]
    return found["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def texts(found: list[tuple[str, int, int]]) -> list[str]:
    return [text for text, *_ in found]


def test_prompts_that_left_the_device_are_cached_and_answered_the_same(model: Path, tmp_path: Path) -> None:
    disk = f"--disk-cache={tmp_path / 'pages'}"
    with running(model, *SMALL) as server:
        expected = answers(server)
    with running(model, *TIERS, disk, "--disk-cache-size=1MiB") as server:
        for _ in range(2):
            found = answers(server)
            assert texts(found) == texts(expected)
            assert not any(cached for *_, cached in found), "the device holds two prompts, and a page is stored late"

        def cached() -> bool:
            """A load may be slower than computing on a busy machine, and is then left out."""
            found = answers(server)
            assert texts(found) == texts(expected)
            return all(cached == (tokens - 1) // 16 * 16 for _, tokens, cached in found)

        eventually(cached, what="all prompts are cached")
        with server.metrics() as http:
            metrics = http.get("/metrics").text
        for name in ("load_back_tokens_total", "kv_tier_stored_tokens_total", "kv_tier_used_bytes"):
            assert re.search(rf'^treeline:{name}{{medium="CPU",model_name="[^"]+"}} [1-9]', metrics, re.MULTILINE), name
        assert re.search(r'^treeline:load_back_total{model_name="[^"]+",outcome="loaded"} [1-9]', metrics, re.MULTILINE)
        with server.client() as http:
            tiers = http.get("/server_info").json()["internal_states"][0]["tiers"]
        assert tiers["total_loads"]["loaded"] > 0
        assert tiers["total_failures"] == {"bad_page": 0, "copy": 0, "disk": 0, "peer": 0}
        with server.admin() as admin:
            assert admin.post("/sleep").status_code == 200
            assert admin.post("/wake_up").status_code == 200
        assert texts(answers(server)) == texts(expected)
    with running(model, *TIERS, disk) as server:
        found = answers(server)
        assert texts(found) == texts(expected)
        assert any(cached for *_, cached in found), "the disk outlives the server"
        with server.admin() as admin:
            assert admin.post("/flush_cache").status_code == 200
        assert not [path for path in (tmp_path / "pages").rglob("*") if path.is_file() and path.name != "lock"]
        assert not any(cached for *_, cached in answers(server))


def test_data_parallel_ranks_share_the_sizes(model: Path, tmp_path: Path) -> None:
    flags = ("--dp-size=2", "--host-cache=4MiB", f"--disk-cache={tmp_path}", "--max-total-tokens=512", "--no-events")
    with running(model, *flags) as server, server.client() as http:
        pages = http.get("/server_info").json()["host_pages"]
        assert pages * 16 * 2 * 2 * 2 * 8 * 4 == 2 << 20
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host-cache=16GiB", "--tp-size=2", "--nnodes=2", "--dist-init-addr=127.0.0.1:1"], "on one machine"),
        (["--disk-cache=/tmp/pages"], "--disk-cache needs --host-cache"),
        (["--host-cache=lots"], "expected a size like 16GiB"),
        (["--host-cache=0"], "must be above 0"),
    ],
)
def test_what_does_not_work_is_refused_by_name(model: Path, flags: list[str], words: str) -> None:
    server = ServerProcess(model, *flags, "--no-events")
    assert server.wait() == 2
    assert any(words in line for line in server.log), server.log
