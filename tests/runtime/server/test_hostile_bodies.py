"""Bodies made to delay other requests: the event loop stays free, no answer is 500, memory stays bounded."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cpu import reference_s
from support.fake_scheduler import Magic
from support.loop_watch import Holds
from support.runtime_server import ServerProcess, eventually, running

pytestmark = [pytest.mark.integration, pytest.mark.deep]

HELD = 15
"""The most that a body may hold the loop, in units of `reference_s`."""
ANSWER_HELD = 45
"""The same for a giant answer: it takes long to write, and other tests run beside it."""
TRIES = 3
"""A body that holds the loop does so each time; a busy machine disturbs one try or another."""
NEVER_ANSWERED = ("128 prompts of 4,000 ids",)
"""They are accepted, and the fake scheduler never answers them, so the client leaves when all of them run."""
MB = 1 << 20
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(scope="module")
def holds(tmp_path_factory: pytest.TempPathFactory) -> Holds:
    return Holds(tmp_path_factory.mktemp("holds") / "holds")


@pytest.fixture(scope="module")
def watched(model: Path, holds: Holds) -> Iterator[ServerProcess]:
    with running(model, fake=True, environment={"LOOP_WATCH": str(holds.path), "FAKE_TOKEN_S": "0.002"}) as server:
        with server.client() as http:  # once its readers run, and the first request has been answered
            assert http.post("/tokenize", json={"prompt": "a " * 20_000}).status_code == 200
            assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        yield server


def messages(content: Any, count: int = 1) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}] * count


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": messages("hi"), "max_tokens": 1} | fields).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 1} | fields).encode()


def raw_chat(member: str) -> bytes:
    return f'{{"messages":[{{"role":"user","content":"hi"}}],"max_tokens":1,{member}}}'.encode()


def written(value: Any) -> bytes:
    """Return JSON with characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False).encode()


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "1 MB of text": (TEXT, lambda: text(prompt="Hello world, " * (MB // 13))),
    "30 MB of text": (TEXT, lambda: text(prompt="Hello world, " * (30 * MB // 13))),
    "30 MB of chat": (CHAT, lambda: chat(messages=messages("Hello world, " * (30 * MB // 13)))),
    "8 MB of blanks": (CHAT, lambda: chat(messages=messages(" " * 8 * MB))),
    "8 MB of ideographs": (
        TEXT,
        lambda: written({"prompt": "\u597d" * (8 * MB // 3)}),
    ),
    "8 MB of accents to compose": (
        TEXT,
        lambda: written({"prompt": "e\u0301" * 2_700_000}),
    ),
    "6 MB of special tokens": (TEXT, lambda: text(prompt="<|im_end|>" * 600_000)),
    "many messages": (CHAT, lambda: chat(messages=messages("", 300_000))),
    "many messages in 8 kB": (CHAT, lambda: chat(messages=messages("", 250))),
    "many parts": (CHAT, lambda: chat(messages=messages([{"type": "text", "text": ""}] * 300_000))),
    "many keys": (CHAT, lambda: chat(**{f"k{i}": i for i in range(500_000)})),
    "many keys that are harmless": (CHAT, lambda: chat(metadata={f"k{i}": i for i in range(500_000)})),
    "many keys of a message": (
        CHAT,
        lambda: chat(messages=[messages("hi")[0] | {f"k{i}": None for i in range(300_000)}]),
    ),
    "one long key": (CHAT, lambda: chat(**{"k" * 8 * MB: 1})),
    "one key 500,000 times": (CHAT, lambda: raw_chat(",".join(['"max_tokens":1'] * 500_000))),
    "deep arrays": (CHAT, lambda: raw_chat(f'"metadata":{nested(5_000_000, "[", "]")}')),
    "deep objects": (CHAT, lambda: raw_chat(f'"metadata":{nested(900)}')),
    "nested template arguments": (CHAT, lambda: raw_chat(f'"chat_template_kwargs":{nested(900)}')),
    "nested documents": (CHAT, lambda: raw_chat(f'"documents":[{nested(900)}]')),
    "nested tools": (CHAT, lambda: raw_chat(f'"tool_choice":"none","tools":[{nested(900)}]')),
    "nested content": (CHAT, lambda: chat(messages=messages(json.loads(nested(400, "[", "]"))))),
    "a long integer": (CHAT, lambda: raw_chat(f'"max_tokens":{"9" * MB}')),
    "a long fraction": (CHAT, lambda: raw_chat(f'"temperature":0.{"1" * MB}')),
    "a number beyond floats": (CHAT, lambda: raw_chat('"temperature":1e400')),
    "a number beyond integers": (CHAT, lambda: raw_chat('"max_tokens":1e300')),
    "8 kB of numbers that take long": (CHAT, lambda: raw_chat(f'"metadata":[{"9.092e300," * 780}1]')),
    "8 kB of them in a schema": (TEXT, lambda: text(guided_json=f'{{"enum":[{"9.092e300," * 780}1]}}')),
    "5 million numbers": (CHAT, lambda: chat(metadata=[0] * 5_000_000)),
    "5 million empty objects": (CHAT, lambda: chat(metadata=[{}] * 5_000_000)),
    "10 million ids": (TEXT, lambda: text(prompt=[1] * 10_000_000)),
    "10 million native ids": (NATIVE, lambda: written({"input_ids": [1] * 10_000_000})),
    "1,024 prompts of 4,000 ids": (TEXT, lambda: text(prompt=[[1] * 4_000] * 1024)),
    "128 prompts of 4,000 ids": (TEXT, lambda: text(prompt=[[60] * 4_000] * 128, max_tokens=1)),
    "a million prompts": (TEXT, lambda: text(prompt=["a"] * 1_000_000)),
    "a million native prompts": (NATIVE, lambda: written({"text": ["a"] * 1_000_000})),
    "a million stop strings": (TEXT, lambda: text(stop=["a"] * 1_000_000)),
    "a million biases": (TEXT, lambda: text(logit_bias={str(i): 1 for i in range(1_000_000)})),
    "a long model": (TEXT, lambda: text(model="m" * 8 * MB)),
    "a long rid": (TEXT, lambda: text(rid="m" * 8 * MB)),
    "a long salt": (TEXT, lambda: text(cache_salt="m" * 8 * MB)),
    "30 MB as items": ("/v1/responses", lambda: written({"input": messages("Hello world, " * (30 * MB // 13))})),
    "many items": ("/v1/responses", lambda: written({"input": messages("", 150_000)})),
    "30 MB that would be repeated": (
        "/v1/responses",
        lambda: written(
            {"input": "x", "tool_choice": "none", "tools": [{"type": "function", "name": "f" * 1000}] * 30_000}
        ),
    ),
    "2 MB that are repeated": (
        "/v1/responses",
        lambda: written(
            {
                "input": "x",
                "max_output_tokens": 1,
                "stream": True,
                "tool_choice": "none",
                "tools": [{"type": "function", "name": f"f{i}", "description": "x" * 2000} for i in range(900)],
            }
        ),
    ),
    "many blocks": (
        "/v1/messages",
        lambda: written({"messages": messages([{"type": "text", "text": "a"}] * 150_000), "max_tokens": 1}),
    ),
    "many results": (
        "/v1/messages",
        lambda: written(
            {"messages": messages([{"type": "tool_result", "tool_use_id": "c"}] * 100_000), "max_tokens": 1}
        ),
    ),
    "30 MB to count": (
        "/v1/messages/count_tokens",
        lambda: written({"messages": messages("Hello world, " * (30 * MB // 13))}),
    ),
    "no JSON": (TEXT, lambda: b'"' + b"x" * 30 * MB),
    "escapes": (TEXT, lambda: b'{"prompt":"' + b"\\u00e9" * 4_000_000 + b'"}'),
    "halves of surrogate pairs": (TEXT, lambda: b'{"prompt":"' + b"\\ud83d" * 10_000 + b'"}'),
    "30 MB to tokenize": ("/tokenize", lambda: written({"prompt": "Hello world, " * (30 * MB // 13)})),
    "5 million ids to detokenize": ("/detokenize", lambda: written({"tokens": [50] * 5_000_000})),
    "lists to detokenize": ("/detokenize", lambda: written({"tokens": [[50]] * 1_000_000})),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BODIES)
def test_no_body_holds_the_event_loop(watched: ServerProcess, holds: Holds, name: str) -> None:
    held: list[float] = []
    while len(held) < TRIES and (not held or held[-1] >= 1000 * HELD * reference_s()):
        holds.clear()
        post(watched, name)
        held.append(holds.worst_ms())
    assert min(held) < 1000 * HELD * reference_s(), held


@functools.lru_cache(maxsize=1)
def body_of(name: str) -> bytes:
    """Return the body of that name, made once for all tries."""
    return BODIES[name][1]()


def post(server: ServerProcess, name: str) -> None:
    path, _ = BODIES[name]
    body = body_of(name)
    with server.client() as http:
        if name in NEVER_ANSWERED:
            with being_answered(server, http, path, body, count=128):
                pass
        else:
            answer = http.post(path, content=body, timeout=250)
            assert answer.status_code in (200, 400, 404, 413), answer.text[:300]
            assert answer.status_code == 200 or len(answer.content) < 2000
        assert http.get("/live").status_code == 200


@contextmanager
def being_answered(server: ServerProcess, http: httpx.Client, path: str, body: bytes, count: int) -> Iterator[None]:
    """Keep `count` generations of a request running during the block; then its client leaves."""

    def running_now() -> int:
        return int(http.get("/v1/loads").json()["loads"][0]["running"])

    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=60) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: running_now() == count, what="all run")
        yield
    eventually(lambda: running_now() == 0, what="all have ended")


@pytest.mark.timeout(300)
def test_many_hostile_bodies_at_once_leave_room_for_others(watched: ServerProcess, holds: Holds) -> None:
    names = [
        *("deep objects", "nested template arguments", "nested documents", "nested tools", "nested content"),
        *("many messages in 8 kB", "a number beyond floats", "a number beyond integers"),
        *("halves of surrogate pairs", "30 MB of chat", "5 million numbers"),
    ]
    threads = [threading.Thread(target=post, args=(watched, name)) for name in names]
    for thread in threads:
        thread.start()
    answered = 0
    with watched.client() as http:
        while any(thread.is_alive() for thread in threads):
            answer = http.post(TEXT, json={"prompt": "hello", "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            answered += 1
    for thread in threads:
        thread.join()
    assert answered >= 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("path", "logprobs"), [(CHAT, {"logprobs": True, "top_logprobs": 20}), (TEXT, {"logprobs": 20})]
)
def test_a_giant_answer_does_not_hold_the_event_loop(
    watched: ServerProcess, holds: Holds, path: str, logprobs: dict[str, Any]
) -> None:
    body = json.loads(chat() if path == CHAT else text(prompt=[[70 + i] for i in range(128)]))
    body |= logprobs | {"max_tokens": 400, "n": 128 if path == CHAT else 1}
    held: list[float] = []
    while len(held) < TRIES and (not held or held[-1] >= 1000 * ANSWER_HELD * reference_s()):
        holds.clear()
        with watched.client() as http:
            answer = http.post(path, json=body, timeout=250)
        assert answer.status_code == 200, answer.text[:300]
        assert len(answer.content) > (50 * MB if path == CHAT else MB)
        held.append(holds.worst_ms())
    assert min(held) < 1000 * ANSWER_HELD * reference_s(), held


def test_repeated_large_bodies_do_not_grow_the_memory(watched: ServerProcess) -> None:
    path, made = BODIES["30 MB of chat"]
    body = made()
    with watched.client() as http:
        before = rss_mb(watched.process.pid)
        for _ in range(10):
            assert http.post(path, content=body).status_code == 400
        assert rss_mb(watched.process.pid) - before < 100


def test_requests_beyond_the_budget_get_a_retry_or_never_fit(model: Path) -> None:
    budget = ("--max-bytes-in-flight", str(4 * MB))
    with running(model, *budget, "--no-events", fake=True) as server, server.client() as http:
        large = text(prompt="a" * 5 * MB)
        for body in (large, iter([large[: 3 * MB], large[3 * MB :]])):  # announced, and in chunks
            never = http.post(TEXT, content=body)
            assert (never.status_code, never.json()["error"]["code"]) == (413, "request_too_large")
            assert f"more than the {4 * MB} that all requests together" in never.json()["error"]["message"]
            assert "--max-bytes-in-flight" in never.json()["error"]["message"]
            assert not {"retry-after", "x-treeline-overloaded"} & set(never.headers)
        # prompts that are being answered count too: 3,000 tokens x 64 choices x 16 bytes are 3 MB
        silent = text(prompt=[[Magic.SILENT] * 3_000], n=64, max_tokens=1)
        with being_answered(server, http, TEXT, silent, count=64):
            answer = http.post(TEXT, content=text(prompt="a" * 2 * MB))
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.headers["x-treeline-overloaded"] == "true"
            assert answer.json()["error"]["code"] == "overloaded"
            assert http.post(TEXT, content=text()).status_code == 200
        for _ in range(8):  # the budget is returned in every case
            assert http.post(TEXT, content=text(prompt="a" * 3 * MB)).status_code == 400
        many = text(prompt=[[50] * 3_000], n=128, max_tokens=1)
        assert http.post(TEXT, content=many).status_code == 413
        assert http.post(TEXT, content=text()).status_code == 200


def test_a_body_announced_as_too_large_is_refused_at_once(watched: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(watched.url).port or 0), timeout=60) as client:
        client.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: a\r\ncontent-length: {33 * MB}\r\n\r\n".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")
    with watched.admin() as http:
        answer = http.post("/abort_request", content=b" " * 100_000)
        assert answer.status_code == 413


@pytest.fixture(scope="module")
def with_secrets(model: Path) -> Iterator[ServerProcess]:
    environment = {"HF_TOKEN": "hf_secret", "TREELINE_API_KEY": "key_secret"}
    with running(model, "--no-events", fake=True, environment=environment) as server:
        yield server


def test_a_reader_that_dies_is_replaced(with_secrets: ServerProcess) -> None:
    body = text(prompt="a b " * 20)[:-1] + b" " * 20_000 + b"}"
    with with_secrets.client(headers={"authorization": "Bearer key_secret"}) as http:
        assert http.post(TEXT, content=body).status_code == 200
        for pid in (killed := eventually(lambda: readers(with_secrets.process.pid))):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not set(killed) & set(readers(with_secrets.process.pid)), what="they have ended")
        statuses = [http.post(TEXT, content=body).status_code for _ in range(3)]
        assert statuses == [200, 200, 200]


def test_readers_have_no_secrets(with_secrets: ServerProcess) -> None:
    for pid in eventually(lambda: readers(with_secrets.process.pid)):
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def rss_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def readers(parent: int) -> list[int]:
    """Return the pids of a server's reader processes."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat[1]) == parent and stat[0] != "Z" and b"reader_process" in command:
            found.append(int(folder.name))
    return found
