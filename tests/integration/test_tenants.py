"""Two API keys at the edge: one client learns nothing of the other's prompts. Real Envoy, picker and runtimes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from zlib import crc32

import httpx
import psutil
import pytest
from openai import OpenAI
from support.prompts import text
from support.stack import Stack, running_stack, until
from treeline_wire import headers
from treeline_wire.namespaces import join_namespace

pytestmark = [pytest.mark.integration, pytest.mark.deep]

KEYS = {"ada": "sk-ada", "bob": "sk-bob"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of one runtime, so that every prompt meets the same cache."""
    with running_stack(tmp_path_factory.mktemp("tenants"), replicas=1, api_keys=KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings: dict[str, Any] = {"api_keys": KEYS, "isolation": "Shared", "expose_routing": False}
    with running_stack(tmp_path_factory.mktemp("sharing"), replicas=1, **settings) as running:
        yield running


def ask(stack: Stack, client: str, prompt: str, told: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    answer = stack.http.post(
        f"{stack.url}/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 1} | body,
        headers={"authorization": f"Bearer {KEYS[client]}"} | (told or {}),
    )
    assert answer.status_code == 200, answer.text
    return answer


def cached(*args: Any, **body: Any) -> int:
    """Return the cached tokens of an answer, the same in header and body."""
    answer = ask(*args, **body)
    counted = int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert int(answer.headers[headers.CACHED_TOKENS]) == counted
    return counted


def test_each_key_hits_its_own_prefixes_and_none_of_the_other(stack: Stack) -> None:
    prompt = text(60, seed=21)
    assert cached(stack, "ada", prompt) == 0
    assert cached(stack, "bob", prompt) == 0
    assert cached(stack, "ada", prompt) > 0
    assert cached(stack, "bob", prompt) > 0


def test_the_openai_client_sees_a_hit_for_its_own_key_alone(stack: Stack) -> None:
    messages: Any = [{"role": "user", "content": text(60, seed=22)}]

    def hit(key: str) -> int:
        with OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert (hit("sk-ada"), hit("sk-bob")) == (0, 0)
    assert hit("sk-ada") > 0


@pytest.mark.parametrize(
    "told",
    [
        {headers.CLIENT: "ada"},
        {headers.CLIENT: "ada", headers.ISOLATION: headers.PER_KEY, headers.EDGE: "true"},
        {headers.CLIENT.title(): "ada"},
        {headers.ISOLATION: headers.SHARED},
        {headers.ISOLATION: ""},
        {"x-treeline-client-": "ada", "X-TREELINE-CLIENT": "ada,bob"},
    ],
    ids=repr,
)
def test_no_header_of_a_caller_reaches_another_clients_cache(stack: Stack, told: dict[str, str]) -> None:
    prompt = text(60, seed=crc32(f"header {told}".encode()))
    assert cached(stack, "ada", prompt) == 0
    assert cached(stack, "bob", prompt, told) == 0


@pytest.mark.parametrize("member", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("salt", ["ada", join_namespace(None, None, "ada"), '{"client": "ada"}'])
def test_no_salt_of_a_caller_reaches_another_clients_cache(stack: Stack, member: str, salt: str) -> None:
    prompt = text(60, seed=crc32(f"salt {member} {salt}".encode()))
    assert cached(stack, "ada", prompt) == 0
    assert cached(stack, "bob", prompt, **{member: salt}) == 0
    assert cached(stack, "ada", prompt) > 0


def test_the_picker_knows_each_clients_prefix_in_its_own_namespace(stack: Stack) -> None:
    prompt = text(60, seed=23)
    before = stack.metrics()
    ask(stack, "ada", prompt)
    stack.agree("runtime-0")
    namespaces = {block["namespace"] for block in stack.radix("runtime-0")["blocks"]}
    assert join_namespace(None, None, "ada") in namespaces
    assert None not in namespaces, "no client without a key was served"
    ask(stack, "bob", prompt)
    unpredicted = stack.metrics()
    assert unpredicted["treeline_epp_predicted_hit_tokens_total"] == before.get(
        "treeline_epp_predicted_hit_tokens_total", 0.0
    )
    hit = cached(stack, "ada", prompt)
    after = until(
        lambda: (
            stack.metrics()["treeline_epp_predicted_hit_tokens_total"]
            > unpredicted["treeline_epp_predicted_hit_tokens_total"]
            and stack.metrics()
        ),
        "the picker expected ada's hit",
    )
    assert hit > 0
    for client in KEYS:
        assert after[f'treeline_epp_client_requests_total{{client="{client}"}}'] > 0
        assert after[f'treeline_epp_client_prompt_tokens_total{{client="{client}"}}'] > 0


def test_the_access_log_names_the_client_and_no_key(stack: Stack) -> None:
    ask(stack, "bob", "hello", {"x-request-id": "who-was-it"})
    log = until(lambda: "who-was-it" in stack.log("envoy", 1000) and stack.log("envoy", 1000), "the request is logged")
    line = next(line for line in log.splitlines() if "who-was-it" in line)
    assert '"api_client":"bob"' in line
    assert "sk-" not in log


def test_unread_answers_of_one_client_do_not_block_another(stack: Stack) -> None:
    host, _, port = stack.url.removeprefix("http://").rpartition(":")

    def streams() -> float:
        return stack.metrics()["treeline_epp_extproc_streams"]

    with ExitStack() as unread:
        for seed in range(2000, 2200):  # three times as many as the runtime computes at once
            asked = {"model": "tiny", "prompt": text(20, seed=seed), "max_tokens": 900, "ignore_eos": True}
            body = json.dumps(asked | {"stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: edge\r\nx-api-key: {KEYS['ada']}\r\n"
            fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            connection = unread.enter_context(socket.create_connection((host, int(port))))
            connection.sendall((head + fields).encode() + body)
        until(lambda: streams() == 200, "all of them are asked")
        for seed in range(10):
            ask(stack, "bob", text(20, seed=3000 + seed), max_tokens=4)
        # Envoy ends the stream of bob's last answer only after he has read it: it may still be counted.
        assert streams() >= 200, "ada's answers are still being computed"
    until(lambda: streams() == 0, "they are cancelled")


def test_clients_are_kept_apart_while_no_picker_answers(stack: Stack) -> None:
    prompt = text(60, seed=24)
    assert cached(stack, "ada", prompt) == 0
    stack.end("picker")
    try:
        assert cached(stack, "bob", prompt, {headers.CLIENT: "ada"}) == 0
        assert cached(stack, "ada", prompt) > 0
    finally:
        stack.start("picker")


def test_clients_that_share_a_cache_learn_nothing_of_each_other(sharing: Stack) -> None:
    prompt = text(60, seed=25)
    for client in ("ada", "bob", "bob"):
        answer = ask(sharing, client, prompt)
        assert "prompt_tokens_details" not in answer.json()["usage"]
        assert not [name for name in answer.headers if name.startswith("x-treeline")]
    found = sharing.metrics()["treeline_epp_reported_hit_tokens_total"]
    assert found > 0, "they do share it, and the picker knows"


def test_envoy_has_no_admin_page_on_this_machine(stack: Stack) -> None:
    process = stack.processes["envoy"]
    assert process.popen is not None
    connections = psutil.Process(process.popen.pid).net_connections("tcp")
    assert {found.laddr.port for found in connections if found.status == "LISTEN"} == {stack.options.port}
