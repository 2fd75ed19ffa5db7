"""Requests of popular clients, copied from their sources, one each, are all answered."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from support.runtime_server import sse

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
SAY = [{"role": "user", "content": "hello world"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm 0.8.1, text": (
        TEXT,
        {
            "model": "random",
            "stream": True,
            "stream_options": USAGE,
            "max_tokens": 2,
            "stop": None,
            "ignore_eos": True,
            "prompt": "a",
        },
    ),
    "guidellm 0.8.1, chat": (
        CHAT,
        {
            "stream": True,
            "stream_options": USAGE,
            "max_completion_tokens": 2,
            "stop": None,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        },
    ),
    "aiperf 0.13.0": (
        CHAT,
        {
            "messages": SAY,
            "model": "random",
            "stream": True,
            "max_completion_tokens": 2,
            "stream_options": USAGE,
        },
    ),
    "inference-perf 0.7.0": (
        CHAT,
        {
            "model": "random",
            "messages": SAY,
            "max_tokens": 2,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "lm_eval 0.4.13, loglikelihood": (
        TEXT,
        {
            "model": "random",
            "prompt": [[5, 6, 7]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    "lm_eval 0.4.13, chat": (
        CHAT,
        {
            "messages": SAY,
            "model": "random",
            "max_tokens": 2,
            "temperature": 0,
            "stop": ["\n\n"],
            "seed": 1234,
        },
    ),
    "vllm bench serve": (
        TEXT,
        {
            "model": "random",
            "prompt": "a",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 2,
            "logprobs": None,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "sglang 0.5.23, bench_serving": (
        NATIVE,
        {
            "text": "a",
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
            "stream": True,
            "return_logprob": False,
            "logprob_start_len": -1,
            "lora_path": "",
            "session_id": "s",
        },
    ),
    "sglang 0.5.23, bench_one_batch_server": (
        NATIVE,
        {
            "input_ids": [[5, 6]],
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": 2,
                "ignore_eos": True,
                "json_schema": None,
                "stream_interval": None,
            },
            "return_logprob": False,
            "stream": True,
        },
    ),
    "sglang 0.5.23, cache_hit_kit": (
        NATIVE,
        {
            "input_ids": [5, 6],
            "sampling_params": {"max_new_tokens": 2},
            "stream": True,
            "stream_options": {"include_usage": True},
            "log_metrics": True,
        },
    ),
    "sglang 0.5.23, oai backend": (
        TEXT,
        {
            "model": "random",
            "prompt": "a",
            "best_of": 1,
            "max_tokens": 2,
            "stream": True,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    ),
    "sglang's router": (
        CHAT,
        {"messages": SAY, "max_tokens": 2, "log_metrics": True, "routed_dp_rank": 0, "stream": True},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_real_clients_are_answered(http: httpx.Client, name: str) -> None:
    path, body = REQUESTS[name]
    if not body.get("stream"):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        events = sse(answer)
    assert events[-1] == "[DONE]"


def test_the_usage_so_far_comes_with_each_chunk(http: httpx.Client) -> None:
    for path, prompt in ((CHAT, {"messages": SAY}), (TEXT, {"prompt": "hello"})):
        body = prompt | {"max_tokens": 5, "stream": True, "stream_options": USAGE}
        with http.stream("POST", path, json=body) as answer:
            *chunks, done = sse(answer)
        assert done == "[DONE]"
        counted = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counted == sorted(counted)
        assert counted[-1] == 5
        assert all(
            chunk["usage"] for chunk in chunks if any(c.get("text") or c["finish_reason"] for c in chunk["choices"])
        )


@pytest.mark.parametrize("value", [2.0, 2])
def test_an_integer_may_be_written_with_a_zero_fraction(http: httpx.Client, value: float) -> None:
    for path, body in (
        (CHAT, {"messages": SAY, "max_tokens": value, "n": value, "seed": value, "top_k": value}),
        (TEXT, {"prompt": "a", "max_tokens": value, "min_tokens": value, "stop_token_ids": [value]}),
        (TEXT, {"prompt": [50, 51.0], "max_tokens": value}),
        (NATIVE, {"text": "a", "sampling_params": {"max_new_tokens": value, "n": value}}),
        (NATIVE, {"input_ids": [50.0, 51], "sampling_params": {"max_new_tokens": value}}),
        ("/detokenize", {"tokens": [50, 51.0]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("value", ["1.5", "1e400", "-1e400", "1e300", "NaN", "true", '"1"', "-1.0", "9" * 400])
def test_a_non_integer_is_refused(http: httpx.Client, value: str) -> None:
    for path, body in (
        (CHAT, '{"messages":[{"role":"user","content":"a"}],"max_tokens":%s}'),
        (TEXT, '{"prompt":"a","max_tokens":%s}'),
        (NATIVE, '{"text":"a","sampling_params":{"max_new_tokens":%s}}'),
        (TEXT, '{"prompt":[1,%s],"max_tokens":1}'),
    ):
        answer = http.post(path, content=body % value)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_server_info_has_the_fields_that_kits_read(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert info["disable_radix_cache"] is False
    assert info["tokenizer_path"]


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nhello<|im_end|> end", "hello 你好 🎉 world"])
def test_text_offset_indexes_the_echoed_text(client: openai.OpenAI, http: httpx.Client, prompt: str) -> None:
    ids = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    answer = client.completions.create(
        model="random",
        prompt=prompt,
        echo=True,
        max_tokens=len(ids),
        logprobs=1,
        extra_body={"skip_special_tokens": False},
    )
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert text == prompt * 2
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.text_offset
    # the fake scheduler says nothing of the prompt's log probabilities, so these are the output's
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token:
            assert text[offset:].startswith(token)


def test_min_tokens_holds_back_stop_strings(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "ab" * 10}).json()["tokens"]
    stopped = client.completions.create(model="random", prompt=ids, max_tokens=len(ids), stop="b")
    assert stopped.choices[0].text == "a"
    later = client.completions.create(
        model="random", prompt=ids, max_tokens=len(ids), stop="b", extra_body={"min_tokens": 4}
    )
    assert later.choices[0].finish_reason == "stop"
    assert len(later.choices[0].text) >= 4
    assert set(later.choices[0].text) == {"a", "b"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_large_answer_is_sent_completely(http: httpx.Client, path: str) -> None:
    prompt = (
        {"messages": SAY, "logprobs": True, "top_logprobs": 1}
        if path == CHAT
        else {"prompt": "hello world", "logprobs": 1}
    )
    answer = http.post(path, json=prompt | {"max_tokens": 200, "n": 16})
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(16))
    for choice in choices:
        entries = choice["logprobs"]["content"] if path == CHAT else choice["logprobs"]["tokens"]
        assert len(entries) == 200
