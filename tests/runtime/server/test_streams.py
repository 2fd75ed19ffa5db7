"""Answers and streams, as the official client and a byte-level reader see them (fake scheduler)."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading

import httpx
import openai
import pytest
from support.fake_scheduler import Magic
from support.runtime_server import ServerProcess, eventually, let_go, sse

MESSAGES = [{"role": "user", "content": "hello world"}]


def load(http: httpx.Client) -> int:
    return int(http.get("/v1/loads").json()["loads"][0]["running"])


def test_a_chat_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    prompt = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    answer = client.chat.completions.create(model="random", messages=MESSAGES, max_tokens=6)  # type: ignore[arg-type]
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content == http.post("/detokenize", json={"tokens": prompt[:6]}).json()["text"]
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_chat_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="random", messages=MESSAGES, max_tokens=12)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model="random",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].object == "chat.completion.chunk"
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts].count(None) == len(parts) - 1
    assert parts[-1].choices[0].finish_reason == "length"
    assert all(part.usage is None for part in parts)
    assert (last.choices, last.usage) == ([], whole.usage)


def test_stream_frames_are_exact(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-treeline-cached-tokens"] == "3"
        assert int(response.headers["x-treeline-prompt-tokens"]) > 3
        events = sse(response)
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])


def test_several_choices_are_distinguished(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="random", prompt=["hello", "world wide"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(
        model="random", prompt=["hello", "world wide"], n=2, max_tokens=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[choice.index] for choice in answer.choices] == [choice.text for choice in answer.choices]


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.completions.create(model="random", prompt="one two three", max_tokens=500, stop=[" three"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == "one two"
    eventually(lambda: load(http) == 0, 60, "the scheduler was told")
    kept = client.completions.create(
        model="random",
        prompt="one two three",
        max_tokens=500,
        stop=" three",
        extra_body={"no_stop_trim": True},
    )
    assert kept.choices[0].text == "one two three"
    pieces = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="random", prompt="one two three", max_tokens=500, stop=["e t"], n=2, stream=True
    ):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == {0: "on", 1: "on"}, "the stop string spans tokens, so it was held back in both choices"


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="random", prompt="hello", max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith("hello")
    answer = client.completions.create(model="random", prompt="hello", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(3)]
    chat = client.chat.completions.create(
        model="random",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=4,
        logprobs=True,
        top_logprobs=1,
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    assert all(bytes(entry.bytes or ()).decode() == entry.token for entry in content)
    assert all(len(entry.top_logprobs) == 1 for entry in content)


def test_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nope", prompt="hi")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="random", prompt="hi", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.InternalServerError) as full:
        client.completions.create(model="random", prompt=[Magic.REFUSE])
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"]
    assert full.value.response.headers["x-treeline-overloaded"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_a_plain_error(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": [Magic.REFUSE], "stream": stream}
    answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")


def test_an_error_after_the_first_token_ends_the_stream_with_an_error_object(
    server: ServerProcess, http: httpx.Client, client: openai.OpenAI
) -> None:
    held = [Magic.BREAK, Magic.HELD]
    with http.stream("POST", "/v1/completions", json={"prompt": held, "stream": True}) as response:
        assert response.status_code == 200
        let_go(server.url)
        events = sse(response)
    assert events[-1]["error"]["message"] == "it broke"
    stream = client.completions.create(model="random", prompt=held, stream=True)
    let_go(server.url)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)
    answer = http.post("/v1/completions", json={"prompt": [Magic.BREAK, 50]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_request_that_takes_too_long_is_a_504_or_ends_its_stream_with_an_error(
    server: ServerProcess, http: httpx.Client
) -> None:
    answer = http.post("/v1/completions", json={"prompt": [Magic.LATE, 50], "max_tokens": 9})
    assert (answer.status_code, answer.json()["error"]["message"]) == (504, "it took too long")
    body = {"prompt": [Magic.LATE, Magic.HELD], "max_tokens": 9, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        let_go(server.url)
        *chunks, error = sse(response)
    assert chunks, "what came before, in one piece where the reader is slow"
    assert error["error"]["message"] == "it took too long"


def connected(server: ServerProcess, path: str, body: dict[str, object]) -> socket.socket:
    """Send a request and leave the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    made.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(content)) + content)
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "generations"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4000, "n": 3}, 3),
        ("/v1/completions", {"prompt": [Magic.SILENT], "max_tokens": 4000}, 1),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 4000}}, 2),
        ("/v1/responses", {"input": "hello world", "max_output_tokens": 4000}, 1),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4000}, 1),
        ("/api/chat", {"messages": MESSAGES, "model": "random"}, 1),
    ],
)
def test_a_client_that_leaves_ends_its_requests(
    http: httpx.Client,
    metrics: httpx.Client,
    fake: ServerProcess,
    path: str,
    body: dict[str, object],
    generations: int,
    stream: bool,
) -> None:
    with connected(fake, path, body | {"stream": stream}):
        eventually(lambda: load(http) == generations, 60, "all run")
    eventually(lambda: load(http) == 0, 60, "all are gone")
    aborted = [line for line in metrics.get("/metrics").text.splitlines() if "num_aborted_requests_total{" in line]
    assert float(aborted[0].split()[-1]) >= generations


def test_a_client_that_leaves_ends_its_request_also_with_another_one_sent_behind_it(
    http: httpx.Client, fake: ServerProcess
) -> None:
    with connected(fake, "/v1/completions", {"prompt": [Magic.SILENT], "max_tokens": 4000}) as connection:
        eventually(lambda: load(http) == 1, 60, "it runs")
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    eventually(lambda: load(http) == 0, 60, "it is gone")


def test_abort_request_ends_a_request_with_its_partial_output(
    http: httpx.Client, admin: httpx.Client, fake: ServerProcess
) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with fake.client() as other:
            body = {"text": ["hello", "world"], "sampling_params": {"max_new_tokens": 4000}, "rid": "mine"}
            answers.append(other.post("/generate", json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: load(http) == 2, 60, "both run")
    again = http.post("/generate", json={"text": "x", "rid": "mine"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "rid")
    assert admin.post("/abort_request", json={"rid": "mine"}).status_code == 200
    thread.join(60)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers[0].json()] == [
        "abort",
        "abort",
    ]
    assert (
        http.post("/generate", json={"text": "x", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}).status_code
        == 200
    )


def test_flush_is_refused_while_busy_and_can_wait(http: httpx.Client, admin: httpx.Client, fake: ServerProcess) -> None:
    with connected(fake, "/v1/completions", {"prompt": "hello", "max_tokens": 40}):
        eventually(lambda: load(http) == 1, 60, "it runs")
        busy = admin.post("/flush_cache")
        assert (busy.status_code, busy.json()["error"]["code"]) == (400, "cache_busy")
        assert admin.post("/flush_cache?timeout=20").status_code == 200
    assert admin.post("/flush_cache").status_code == 200
    for timeout in ("soon", "nan"):
        refused = admin.post(f"/flush_cache?timeout={timeout}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout")


def test_native_answers_are_cumulative(http: httpx.Client) -> None:
    body = {"text": "hello world", "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    whole = http.post("/generate", json=body).json()
    meta = whole["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["completion_tokens"], meta["cached_tokens"]) == (4, 3)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == whole["output_ids"]
    assert meta["output_token_logprobs"][0][2] is None
    with http.stream("POST", "/generate", json=body | {"stream": True, "return_text_in_logprobs": True}) as response:
        *events, done = sse(response)
    assert done == "[DONE]"
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert isinstance(events[-1]["meta_info"]["output_token_logprobs"][0][2], str)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("top", "kinds"), [(0, ["token"]), (2, ["token", "top"])])
def test_native_answers_have_every_requested_list_of_logprobs(
    http: httpx.Client, stream: bool, top: int, kinds: list[str]
) -> None:
    """The prompt has no logprobs, and without output there are none at all: the lists are there, and empty."""
    names = [f"{side}_{kind}_logprobs" for kind in kinds for side in ("input", "output")]
    body = {
        "text": ["a", "b", "c"],
        "sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 2}, {"max_new_tokens": 2}],
        "return_logprob": [True, True, False],
        "logprob_start_len": [1, -1, -1],
        "top_logprobs_num": top,
        "stream": stream,
    }
    if stream:
        with http.stream("POST", "/generate", json=body) as response:
            *events, _ = sse(response)
    else:
        events = [{"index": index} | one for index, one in enumerate(http.post("/generate", json=body).json())]
    assert {event["index"] for event in events} == {0, 1, 2}
    for event in events:
        meta = event["meta_info"]
        lists = {name: value for name, value in meta.items() if name.endswith("_logprobs")}
        assert list(lists) == ([] if event["index"] == 2 else names)
        for name, value in lists.items():
            assert len(value) == (meta["completion_tokens"] if name.startswith("output") else 0)


def test_native_batches_take_one_value_or_one_each(http: httpx.Client) -> None:
    body = {
        "text": ["a", "b"],
        "rid": ["first", "second"],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        "return_logprob": [True, False],
    }
    first, second = http.post("/generate", json=body).json()
    assert [answer["meta_info"]["id"] for answer in (first, second)] == ["first", "second"]
    assert [answer["meta_info"]["completion_tokens"] for answer in (first, second)] == [2, 3]
    assert len(first["meta_info"]["output_token_logprobs"]) == 2
    assert "output_token_logprobs" not in second["meta_info"]
    for field, value in {"rid": ["x"], "return_logprob": [True], "logprob_start_len": [0, 0, 0]}.items():
        refused = http.post("/generate", json=body | {field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    twice = http.post("/generate", json={"text": ["a", "b"], "rid": ["x", "x"]})
    assert (twice.status_code, twice.json()["error"]["message"]) == (400, "rid 'x' is given twice")
    one = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 1, "n": 2}}
    assert [answer["meta_info"]["id"] for answer in http.post("/generate", json=one).json()] == [
        "mine:0",
        "mine:1",
    ]


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "hello world 😀"}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"text": "hello world 😀"}
    both = http.post("/v1/tokenize", json={"prompt": ["a", "hello"]}).json()
    assert both["count"] == [len(ids) for ids in both["tokens"]]
    assert http.post("/v1/detokenize", json={"tokens": both["tokens"]}).json() == {"text": ["a", "hello"]}
    special = http.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": special}).json() == {"text": ""}
    kept = http.post("/detokenize", json={"tokens": special, "skip_special_tokens": False}).json()
    assert kept == {"text": "<|im_end|>"}


def test_the_server_describes_itself(http: httpx.Client, metrics: httpx.Client, fake: ServerProcess) -> None:
    info = http.get("/server_info").json()
    assert info == {**http.get("/get_server_info").json(), "internal_states": info["internal_states"]}
    events = info["kv_events"]
    assert events["publisher"] == "zmq"
    assert events["endpoint_host"] == "127.0.0.1"
    assert all(events[name] > 0 for name in events if name.endswith("_port_base"))
    assert (events["topic"], events["load_topic"], events["block_size"], events["curve"]) == (
        "kv@test",
        "load",
        16,
        False,
    )
    assert info["epoch"] > 0
    assert str(info["port"]) in fake.url
    assert http.get("/model_info").json() == http.get("/get_model_info").json()
    assert http.get("/model_info").json()["model_type"] == "qwen3"
    bundle = http.get("/treeline/tokenizer")
    assert bundle.json()["fingerprint"] == info["tokenizer_fingerprint"]
    assert http.get("/treeline/tokenizer", headers={"if-none-match": bundle.headers["etag"]}).status_code == 304
    assert http.get("/v1/models").json()["data"][0]["id"] == "random"
    assert http.get("/v1/models/random").json()["max_model_len"] == 4096
    assert http.get("/health_generate").status_code == 200
    assert http.get("/live").json()["heartbeats"] > 0
    page = metrics.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_bucket",
        "num_running_reqs",
        "prompt_tokens_total",
        "token_usage",
    ):
        assert f"treeline:{name}{{" in page


def test_debug_radix_joins_the_tree_and_the_announced_pages(http: httpx.Client, admin: httpx.Client) -> None:
    salted = {
        "prompt": "The quick brown fox jumps over the lazy dog " * 2,
        "max_tokens": 1,
        "cache_salt": "s",
    }
    assert http.post("/v1/completions", json=salted).status_code == 200
    shown = admin.get("/debug/radix").json()
    assert shown["epoch"] == http.get("/server_info").json()["epoch"]
    block = shown["blocks"][-1]
    assert (block["namespace"], block["announced"], block["parent"]) == ("s", True, None)
    assert shown["seq"] == len(shown["blocks"]) - 1


def test_the_api_key_guards_all_but_probes(keyed: ServerProcess) -> None:
    with keyed.client() as client:
        for path in ("/live", "/ready", "/health", "/server_info", "/model_info", "/treeline/tokenizer"):
            assert client.get(path).status_code == 200
        assert "correct-horse" not in client.get("/server_info").text
        assert client.get("/server_info").json()["kv_events"] is None
        for answer in (client.get("/v1/models"), client.post("/v1/completions", json={"prompt": "hi"})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    base = f"{keyed.url}/v1"
    with (
        openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong.models.list()
    with openai.OpenAI(base_url=base, api_key="correct-horse") as right:
        assert right.models.list().data[0].id == "mine"
        assert right.completions.create(model="mine", prompt="hi", max_tokens=1).choices[0].text
        with pytest.raises(openai.NotFoundError):
            right.completions.create(model="random", prompt="hi")


async def test_the_async_client_under_concurrency(fake: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="none") as client:

        async def ask(number: int) -> str:
            answer = await client.completions.create(model="random", prompt=f"number {number} of many", max_tokens=12)
            return answer.choices[0].text

        texts = await asyncio.gather(*(ask(number) for number in range(40)))
    assert all(f"number {number}" in text for number, text in enumerate(texts))


def test_a_stream_is_valid_json_throughout(http: httpx.Client) -> None:
    prompt = 'quotes " backslash \\ newline \n tab \t null-ish \x01 emoji 😀 日本'
    body = {"prompt": prompt, "max_tokens": 60, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        *events, _ = sse(response)
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text.startswith(prompt)
    assert json.loads(json.dumps(text)) == text
