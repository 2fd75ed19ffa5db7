"""The server with its real engine: tests that need the whole path."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq
from support.cpu import reference_s
from support.publisher import Consumer
from support.runtime_server import ServerProcess, eventually, running, sse
from treeline_wire import frames, headers
from treeline_wire.events import decode_batch
from treeline_wire.namespaces import join_namespace

pytestmark = [pytest.mark.integration, pytest.mark.deep]

LONG = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    flags = (
        "--enable-debug-endpoints",
        "--max-total-tokens=4096",
        "--max-running-requests=4",
        "--max-queued-requests=4",
        "--schedule-policy=priority",
    )
    with running(model, *flags) as server:
        yield server


def complete(http: httpx.Client, **fields: object) -> dict[str, object]:
    answer = http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 8, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_repeated_prompt_is_cached(http: httpx.Client, admin: httpx.Client) -> None:
    assert admin.post("/flush_cache").status_code == 200
    first = http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 8, "temperature": 0})
    second = http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 8, "temperature": 0})
    usage = second.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached == usage["prompt_tokens"] // 16 * 16 or cached == (usage["prompt_tokens"] - 1) // 16 * 16
    assert second.headers["x-treeline-cached-tokens"] == str(cached)
    assert second.headers["x-treeline-prompt-tokens"] == str(usage["prompt_tokens"])
    assert first.json()["choices"][0]["text"] == second.json()["choices"][0]["text"]
    salted = complete(http, cache_salt="other")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]


def test_streams_equal_answers_and_ids_decode_to_texts(http: httpx.Client) -> None:
    whole = complete(http)["choices"][0]["text"]  # type: ignore[index]
    ids = http.post("/tokenize", json={"prompt": LONG}).json()["tokens"]
    assert complete(http, prompt=ids)["choices"][0]["text"] == whole  # type: ignore[index]
    body = {"prompt": LONG, "max_tokens": 8, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        *events, _ = sse(response)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    native = {"text": LONG, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    assert http.post("/generate", json=native).json()["text"] == whole


def test_sampling_fields_reach_the_engine(http: httpx.Client) -> None:
    seeded = [complete(http, temperature=1.5, seed=7, n=2)["choices"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0][0]["text"] != seeded[0][1]["text"]  # type: ignore[index]
    forced = complete(http, logit_bias={"50": 100}, max_tokens=3)["choices"][0]["text"]  # type: ignore[index]
    assert forced == http.post("/detokenize", json={"tokens": [50] * 3}).json()["text"]
    stopped = complete(http, logit_bias={"50": 100}, stop_token_ids=[50])
    assert stopped["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
    assert stopped["usage"]["completion_tokens"] == 1  # type: ignore[index]


def generated(http: httpx.Client, **sampling: object) -> dict[str, Any]:
    body = {"text": LONG, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True} | sampling}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(http: httpx.Client, *ids: int) -> str:
    return str(http.post("/detokenize", json={"tokens": ids}).json()["text"])


def test_tokens_that_are_excluded_are_not_sampled(http: httpx.Client) -> None:
    word = http.post("/tokenize", json={"prompt": "QZ", "add_special_tokens": False}).json()["tokens"]
    assert len(word) == 2
    drawn = {"temperature": 100.0, "sampling_seed": 5, "max_new_tokens": 40, "allowed_token_ids": word}
    free, barred = (generated(http, **drawn, bad_words=words)["output_ids"] for words in ([], ["QZ"]))
    assert set(free) == set(word) >= set(barred)
    pairs, kept = (list(itertools.pairwise(ids)) for ids in (free, barred))
    assert tuple(word) in pairs
    assert tuple(word) not in kept
    nothing = http.post(
        "/generate",
        json={"text": "a", "sampling_params": {"allowed_token_ids": [50], "bad_words": [text_of(http, 50)]}},
    )
    assert "no token is allowed" in nothing.json()["error"]["message"]


def test_an_output_ends_with_the_token_that_completes_a_match(http: httpx.Client) -> None:
    pattern = f"(?:{re.escape(text_of(http, 50))}){{3}}"
    whole = generated(http, logit_bias={"50": 100}, stop_regex=[r"\d{99}", pattern])
    assert whole["output_ids"] == [50] * 3
    assert whole["text"] == text_of(http, 50, 50, 50)
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    stopped = complete(http, logit_bias={"50": 100}, stop_regex=pattern)["choices"][0]  # type: ignore[index]
    assert (stopped["finish_reason"], stopped["matched_stop"]) == ("stop", pattern)


def chat_of(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/chat/completions", json=body | fields)


def test_token_ids_come_with_answers_and_with_streams(http: httpx.Client) -> None:
    said = {"messages": [{"role": "user", "content": LONG}]}
    prompt = http.post("/tokenize", json=said).json()["tokens"]
    whole = chat_of(http, return_token_ids=True).json()
    (choice,) = whole["choices"]
    assert whole["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 8
    assert text_of(http, *choice["token_ids"]) == choice["message"]["content"]
    assert choice["logprobs"] is None
    *events, _ = sse(chat_of(http, return_token_ids=True, stream=True))  # the first chunk alone has the prompt's
    assert events[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in event for event in events[1:])
    assert [id for event in events for id in event["choices"][0].get("token_ids", [])] == choice["token_ids"]

    body = {"prompt": [prompt, prompt[:9]], "max_tokens": 4, "temperature": 0, "return_token_ids": True, "n": 1}
    told = http.post("/v1/completions", json=body).json()["choices"]
    assert [one["prompt_token_ids"] for one in told] == body["prompt"]
    *events, _ = sse(http.post("/v1/completions", json=body | {"stream": True}))
    for index, one in enumerate(told):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [id for part in mine for id in part["token_ids"]] == one["token_ids"]
        assert [part["prompt_token_ids"] for part in mine if "prompt_token_ids" in part] == [one["prompt_token_ids"]]
    assert "token_ids" not in chat_of(http).json()["choices"][0]


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_cover_the_prompts_tokens_and_the_likeliest(http: httpx.Client, top: int) -> None:
    native = {"text": LONG, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
    meta = http.post("/generate", json=native | {"sampling_params": {"max_new_tokens": 1}}).json()["meta_info"]
    tops = meta["input_top_logprobs"] if top else [None] * len(meta["input_token_logprobs"])
    expected = [None] * (meta["input_token_logprobs"][0][0] is None)
    for (value, id, _), best in list(zip(meta["input_token_logprobs"], tops, strict=True))[1:]:
        ranks = {id: rank for rank, (_, id, _) in enumerate(best or [], 1)}
        pairs = [(id, value), *((id, value) for value, id, _ in best or [])]
        expected.append({str(id): (pytest.approx(value, abs=1e-4), ranks.get(id)) for id, value in pairs})
    (choice,) = http.post(
        "/v1/completions", json={"prompt": LONG, "max_tokens": 2, "prompt_logprobs": top, "logprobs": 1}
    ).json()["choices"]
    told = [one and {id: (of["logprob"], of["rank"]) for id, of in one.items()} for one in choice["prompt_logprobs"]]
    assert told == expected
    assert len(choice["logprobs"]["tokens"]) == 2, "nothing of the prompt without echo"
    assert all(len(best) == 1 for best in choice["logprobs"]["top_logprobs"])

    answer = chat_of(http, prompt_logprobs=top).json()
    ids = http.post("/tokenize", json={"messages": [{"role": "user", "content": LONG}]}).json()["tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert [str(id) in one for id, one in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)] == [True] * (
        len(ids) - 1
    )
    assert answer["choices"][0]["logprobs"] is None
    assert chat_of(http, prompt_logprobs=top, stream=True).json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("api", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_priorities_reach_the_engine(http: httpx.Client, server: ServerProcess, api: str) -> None:
    """All rows are taken; of two waiting requests the urgent one, which came later, gets the first free row."""

    def body_of(tokens: int) -> dict[str, Any]:
        if api == "/generate":
            return {"text": "hello", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        prompt = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in api else {"prompt": "hello"}
        return prompt | {"max_tokens": tokens, "ignore_eos": True}

    ended: list[int] = []

    def ask(priority: int) -> None:
        with server.client() as client:
            # long enough for the other to have ended by far
            body = body_of(4 if priority > 0 else 300) | {"priority": priority}
            assert client.post(api, json=body).status_code == 200
            ended.append(priority)

    def waiting(count: int) -> Callable[[], bool]:
        return lambda: http.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == count

    with contextlib.ExitStack() as streams:
        client = streams.enter_context(server.client())
        body = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True, "priority": 9}
        running = [streams.enter_context(client.stream("POST", "/v1/completions", json=body)) for _ in range(4)]
        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (-1, 1)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            eventually(waiting(count), 60, f"{count} wait")
        running[0].close()
        for thread in threads:
            thread.join(30)
    assert ended == [1, -1]
    eventually(server.idle, 60, "everything is released")


def test_a_prompt_can_be_scored(http: httpx.Client) -> None:
    answer = complete(http, prompt="hello world", echo=True, max_tokens=0, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]  # type: ignore[index]
    assert "".join(logprobs["tokens"]) == "hello world"
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert answer["choices"][0]["finish_reason"] == "length"  # type: ignore[index]


def test_a_chat_runs_to_the_end_of_the_context_by_default(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "temperature": 0, "ignore_eos": True}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 1024


def test_a_full_queue_is_503_and_the_server_recovers(http: httpx.Client, server: ServerProcess) -> None:
    statuses: list[int] = []

    def ask() -> None:
        with server.client() as client:
            body = {"prompt": LONG, "max_tokens": 200, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            statuses.append(answer.status_code)
            if answer.status_code == 503:
                assert answer.headers["retry-after"]
                assert answer.headers["x-treeline-overloaded"]

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    eventually(lambda: http.get("/load").json()["server_load"] > 4, 60, "those that run and those that wait are told")
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 4
    eventually(server.idle, 60, "everything is released")


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_frees_its_pages(server: ServerProcess, stream: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "hello", "max_tokens": 1000, "ignore_eos": true, "stream": %s}' % stream.encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: not server.idle(), 60, "it runs")
    eventually(server.idle, 60, "it is gone")


def test_clients_that_disconnect_under_load_leave_nothing_behind(
    http: httpx.Client, admin: httpx.Client, server: ServerProcess
) -> None:
    """Four stay, four leave in the middle of a stream, four while waiting for a whole answer."""
    alone = [str(complete(http, prompt=f"{i} {LONG}", max_tokens=40)["choices"]) for i in range(4)]
    answers: dict[int, str] = {}

    def stay(i: int) -> None:
        with server.client() as client:
            while i not in answers:  # the queue is short, and a refusal is no answer
                body = {"prompt": f"{i} {LONG}", "max_tokens": 40, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    answers[i] = str(answer.json()["choices"])

    def leave(i: int, stream: bool) -> None:
        body = {"prompt": f"{i} {LONG}", "max_tokens": 700, "ignore_eos": True, "stream": stream}
        with httpx.Client(base_url=server.url, timeout=60 if stream else 0.2) as client:
            try:
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for _ in response.iter_bytes():
                        break
            except httpx.ReadTimeout:
                pass

    threads = [threading.Thread(target=stay, args=(i,)) for i in range(4)]
    threads += [threading.Thread(target=leave, args=(i % 6, i % 2 == 0)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[i] for i in range(4)] == alone
    eventually(server.idle, 60, "everything is released")
    load = http.get("/v1/loads").json()["loads"][0]
    assert load["pages_cached"] == len(admin.get("/debug/radix").json()["blocks"]), "the rest is free"


def test_events_add_up_to_the_cache(http: httpx.Client, admin: httpx.Client) -> None:
    ports = http.get("/server_info").json()["kv_events"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(f"tcp://127.0.0.1:{ports['replay_endpoint_port_base']}")
    try:
        assert admin.post("/flush_cache").status_code == 200
        for number in range(30):  # more than the cache holds, so pages are evicted
            complete(http, prompt=f"{number} {LONG}", max_tokens=40, ignore_eos=True)
        shown = admin.get("/debug/radix").json()
        client.send_multipart(frames.replay_request(0))
        consumer = Consumer()
        while True:
            assert client.poll(60_000)
            reply = frames.parse_reply(client.recv_multipart())
            if isinstance(reply, frames.ReplayEnd):
                break
            assert isinstance(reply, frames.ReplayItem)
            consumer.apply(decode_batch(reply.payload).events)
    finally:
        context.destroy(linger=0)
    announced = {int(block["hash"]): block for block in shown["blocks"] if block["announced"]}
    assert reply == frames.ReplayEnd()
    assert len(announced) > 50
    assert set(consumer.pages) == set(announced)
    assert not consumer.orphans
    for block, (parent, tokens) in consumer.pages.items():
        assert announced[block]["tokens"] == list(tokens)
        assert announced[block]["parent"] == (None if parent is None else str(parent))


# ---- whose cache a request uses, by the headers of the edge, and what its answer tells of it ------------------------

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def fresh(http: httpx.Client, admin: httpx.Client) -> httpx.Client:
    """Return the client, after emptying the server's cache."""
    assert admin.post("/flush_cache", params={"timeout": 10}).status_code == 200
    return http


def edge(client: str | None, isolation: str = headers.PER_KEY) -> dict[str, str]:
    """Return the headers that our edge sets."""
    return {headers.ISOLATION: isolation} | ({headers.CLIENT: client} if client else {})


def cached(http: httpx.Client, told: dict[str, str], **body: Any) -> int:
    """Return the cached tokens of a request, by the header that the picker reads; the body says the same."""
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1} | body, headers=told)
    assert answer.status_code == 200, answer.text
    found = int(answer.headers[headers.CACHED_TOKENS])
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == found
    return found


def test_a_client_hits_only_its_own_prompts(fresh: httpx.Client) -> None:
    assert cached(fresh, edge("ada")) == 0
    assert cached(fresh, edge("bob")) == 0
    assert cached(fresh, {}) == 0
    assert cached(fresh, edge("ada")) > 0
    assert cached(fresh, edge("bob")) > 0


@pytest.mark.parametrize("member", ["cache_salt", "extra_key"])
def test_no_salt_reaches_another_clients_cache(fresh: httpx.Client, member: str) -> None:
    cached(fresh, edge("ada"))
    namespace = join_namespace(None, None, "ada")
    for guess in ("ada", namespace, json.dumps(namespace), '{"client": "ada"}'):
        assert cached(fresh, edge("bob"), **{member: guess}) == 0, guess
        assert cached(fresh, {}, **{member: guess}) == 0, guess


def test_a_salt_separates_within_a_client(fresh: httpx.Client) -> None:
    cached(fresh, edge("ada"), cache_salt="s")
    assert cached(fresh, edge("ada")) == 0
    assert cached(fresh, edge("ada"), cache_salt="s") > 0


def test_a_clients_name_without_the_edges_header_is_ignored(fresh: httpx.Client) -> None:
    cached(fresh, {headers.CLIENT: "ada"})
    assert cached(fresh, {headers.CLIENT: "bob"}) > 0


def test_the_cache_holds_a_clients_blocks_in_its_namespace(server: ServerProcess, fresh: httpx.Client) -> None:
    cached(fresh, edge("ada"))
    with server.admin() as admin:
        blocks = admin.get("/debug/radix").json()["blocks"]
    assert blocks
    assert {block["namespace"] for block in blocks} == {join_namespace(None, None, "ada")}
    assert all(block["announced"] for block in blocks)


def test_clients_that_share_a_cache_do_not_see_cached_counts(fresh: httpx.Client) -> None:
    cached(fresh, {})
    shared = edge("bob", headers.SHARED)
    body = {"prompt": PROMPT, "max_tokens": 1}
    answer = fresh.post("/v1/completions", json=body, headers=shared)
    assert int(answer.headers[headers.CACHED_TOKENS]) > 0, "the edge removes it, the picker learns from it"
    assert "prompt_tokens_details" not in answer.json()["usage"]
    streamed = fresh.post(
        "/v1/completions",
        json=body | {"stream": True, "stream_options": {"include_usage": True}},
        headers=shared,
    )
    assert '"prompt_tokens":' in streamed.text
    assert "cached_tokens" not in streamed.text
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    for _ in range(2):
        answered = fresh.post("/v1/chat/completions", json=chat, headers=shared)
        assert "cached_tokens" not in answered.text
    for stream in (False, True):
        native = {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}, "stream": stream}
        told = fresh.post("/generate", json=native, headers=shared)
        first = told.text.removeprefix("data: ").split("\n\n")[0]
        assert json.loads(first)["meta_info"]["cached_tokens"] == 0
        assert int(told.headers[headers.CACHED_TOKENS]) > 0


def test_a_rid_in_flight_is_its_clients_own(fresh: httpx.Client) -> None:
    long = {"prompt": "go on", "rid": "mine", "max_tokens": 900, "ignore_eos": True, "stream": True}
    short = {"prompt": "go on", "rid": "mine", "max_tokens": 1}
    with fresh.stream("POST", "/v1/completions", json=long, headers=edge("ada")) as answer:
        assert answer.status_code == 200
        assert fresh.post("/v1/completions", json=short, headers=edge("bob")).status_code == 200
        assert fresh.post("/v1/completions", json=short).status_code == 200
        again = fresh.post("/v1/completions", json=short, headers=edge("ada"))
        assert (again.status_code, again.json()["error"]["param"]) == (400, "rid")


def test_the_server_says_that_it_separates_clients(fresh: httpx.Client) -> None:
    assert fresh.get("/server_info").json()["isolates_clients"] is True


def test_an_idle_server_takes_no_cpu(server: ServerProcess) -> None:
    """Heartbeats and load reports remain: a few milliseconds of CPU time a second and process."""
    eventually(server.idle, 60, "nothing runs")
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    assert len(processes) >= 4

    def took_ms(seconds: float) -> dict[str, float]:
        """Return each process's CPU milliseconds a second."""
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(seconds)  # which is what is measured
        after = [sum(process.cpu_times()[:2]) for process in processes]
        return {
            f"{process.cmdline()[-1]} {process.pid}": 1e3 * (now - then) / seconds
            for process, then, now in zip(processes, before, after, strict=True)
        }

    eventually(lambda: max(took_ms(0.3).values()) < 5e3 * reference_s(), 60, "its reader processes have started")
    measured = took_ms(3.0)
    assert max(measured.values()) < 1.5e3 * reference_s(), measured
