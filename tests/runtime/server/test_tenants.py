"""Whose cache a request uses, by the headers of the edge, and what its answer tells of it: on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, running
from treeline_wire import headers
from treeline_wire.namespaces import join_namespace

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with running(model, "--enable-debug-endpoints") as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client, server.admin() as admin:
        assert admin.post("/flush_cache", params={"timeout": 10}).status_code == 200
        yield client


def edge(client: str | None, isolation: str = headers.PER_KEY) -> dict[str, str]:
    """The headers that our edge sets."""
    return {headers.ISOLATION: isolation} | ({headers.CLIENT: client} if client else {})


def cached(http: httpx.Client, told: dict[str, str], **body: Any) -> int:
    """Tokens that a request found, by the header that the picker reads; the body says the same."""
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1} | body, headers=told)
    assert answer.status_code == 200, answer.text
    found = int(answer.headers[headers.CACHED_TOKENS])
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == found
    return found


def test_a_client_finds_its_own_prompt_again_and_nobody_elses(http: httpx.Client) -> None:
    assert cached(http, edge("ada")) == 0
    assert cached(http, edge("bob")) == 0
    assert cached(http, {}) == 0
    assert cached(http, edge("ada")) > 0
    assert cached(http, edge("bob")) > 0


@pytest.mark.parametrize("member", ["cache_salt", "extra_key"])
def test_no_salt_reaches_another_clients_cache(http: httpx.Client, member: str) -> None:
    cached(http, edge("ada"))
    namespace = join_namespace(None, None, "ada")
    for guess in ("ada", namespace, json.dumps(namespace), '{"client": "ada"}'):
        assert cached(http, edge("bob"), **{member: guess}) == 0, guess
        assert cached(http, {}, **{member: guess}) == 0, guess


def test_a_salt_separates_within_a_client(http: httpx.Client) -> None:
    cached(http, edge("ada"), cache_salt="s")
    assert cached(http, edge("ada")) == 0
    assert cached(http, edge("ada"), cache_salt="s") > 0


def test_a_clients_name_without_the_word_of_the_edge_separates_nothing(http: httpx.Client) -> None:
    cached(http, {headers.CLIENT: "ada"})
    assert cached(http, {headers.CLIENT: "bob"}) > 0


def test_the_cache_holds_a_clients_blocks_in_its_namespace(server: ServerProcess, http: httpx.Client) -> None:
    cached(http, edge("ada"))
    with server.admin() as admin:
        blocks = admin.get("/debug/radix").json()["blocks"]
    assert blocks
    assert {block["namespace"] for block in blocks} == {join_namespace(None, None, "ada")}
    assert all(block["announced"] for block in blocks)


def test_strangers_who_share_a_cache_are_not_told_what_was_cached(http: httpx.Client) -> None:
    cached(http, {})
    shared = edge("bob", headers.SHARED)
    body = {"prompt": PROMPT, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers=shared)
    assert int(answer.headers[headers.CACHED_TOKENS]) > 0, "the edge removes it, the picker learns from it"
    assert "prompt_tokens_details" not in answer.json()["usage"]
    streamed = http.post(
        "/v1/completions",
        json=body | {"stream": True, "stream_options": {"include_usage": True}},
        headers=shared,
    )
    assert '"prompt_tokens":' in streamed.text
    assert "cached_tokens" not in streamed.text
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    for _ in range(2):
        answered = http.post("/v1/chat/completions", json=chat, headers=shared)
        assert "cached_tokens" not in answered.text
    for stream in (False, True):
        native = {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}, "stream": stream}
        told = http.post("/generate", json=native, headers=shared)
        first = told.text.removeprefix("data: ").split("\n\n")[0]
        assert json.loads(first)["meta_info"]["cached_tokens"] == 0
        assert int(told.headers[headers.CACHED_TOKENS]) > 0


def test_a_rid_in_flight_is_its_clients_own(http: httpx.Client) -> None:
    long = {"prompt": "go on", "rid": "mine", "max_tokens": 900, "ignore_eos": True, "stream": True}
    short = {"prompt": "go on", "rid": "mine", "max_tokens": 1}
    with http.stream("POST", "/v1/completions", json=long, headers=edge("ada")) as answer:
        assert answer.status_code == 200
        assert http.post("/v1/completions", json=short, headers=edge("bob")).status_code == 200
        assert http.post("/v1/completions", json=short).status_code == 200
        again = http.post("/v1/completions", json=short, headers=edge("ada"))
        assert (again.status_code, again.json()["error"]["param"]) == (400, "rid")


def test_the_server_says_that_it_separates_clients(http: httpx.Client) -> None:
    assert http.get("/server_info").json()["isolates_clients"] is True
