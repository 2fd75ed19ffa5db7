"""Ollama's API, as its official client sees it (fake scheduler): chats, prompts, streams, options, models, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from support.openapi import Judge
from support.runtime_server import ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def judge(http: httpx.Client) -> Judge:
    return Judge(http.get("/openapi.json").json())


def chat_of(http: httpx.Client, messages: list[Any] = MESSAGES, **more: Any) -> Any:
    """Return the answer of the same chat in OpenAI's API."""
    made = http.post("/v1/chat/completions", json={"messages": messages, **more})
    assert made.status_code == 200, made.text
    return made.json()


# ---- chats ----------------------------------------------------------------------------------------------------------


def test_a_chat_equals_the_answer_of_openais_api(client: ollama.Client, http: httpx.Client) -> None:
    theirs = chat_of(http, max_tokens=9)
    made = client.chat("random", MESSAGES, options={"num_predict": 9})
    assert made.message.content == theirs["choices"][0]["message"]["content"]
    assert (made.message.role, made.done, made.done_reason, made.model) == ("assistant", True, "length", "random")
    usage = theirs["usage"]
    assert (made.prompt_eval_count, made.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert made.total_duration == (made.prompt_eval_duration or 0) + (made.eval_duration or 0) > 0
    assert made.load_duration == 0
    assert made.created_at is not None


def test_a_stream_adds_up_to_the_whole_answer(client: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": "random", "messages": MESSAGES, "options": {"num_predict": 9}}
    whole = client.chat(**asked)
    *parts, last = client.chat(**asked, stream=True)
    assert len(parts) > 1
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert (last.message.content, last.done, last.done_reason) == ("", True, "length")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)


def test_answers_are_streamed_unless_told_otherwise(http: httpx.Client, judge: Judge) -> None:
    for path, asked in (("/api/chat", {"messages": MESSAGES}), ("/api/generate", {"prompt": "hi"})):
        body = {"model": "random", "options": {"num_predict": 3}, **asked}
        made = http.post(path, json=body)
        assert made.headers["content-type"].partition(";")[0] == "application/x-ndjson"
        lines = [json.loads(line) for line in made.text.splitlines()]
        assert lines[-1]["done"] is True
        for line in lines:
            judge.answer(path, kind="application/x-ndjson").validate(line)
        whole = http.post(path, json=body | {"stream": False})
        assert whole.headers["content-type"] == "application/json"
        judge.answer(path).validate(whole.json())


def test_options_reach_the_sampler(client: ollama.Client, http: httpx.Client) -> None:
    stopped = client.chat("random", MESSAGES, options={"num_predict": 90, "stop": ["world"]})
    assert (stopped.done_reason, stopped.eval_count) == ("stop", (stopped.eval_count or 0))
    assert "world" not in (stopped.message.content or "")
    for name, value, told in (
        ("temperature", -1, "options.temperature"),
        ("top_p", 2, "options.top_p"),
        ("repeat_penalty", 0, "options.repeat_penalty"),
        ("min_p", 7, "options.min_p"),
        ("seed", "x", "options.seed"),
        ("stop", ["x" * 2000], "options.stop"),
        ("unheard_of", 1, "options.unheard_of"),
    ):
        with pytest.raises(ollama.ResponseError, match=told) as refused:
            client.chat("random", MESSAGES, options={name: value})
        assert refused.value.status_code == 400
    ignored = {"num_ctx": 4096, "mirostat": 2, "repeat_last_n": 3}
    body = {"model": "random", "messages": MESSAGES, "keep_alive": "5m", "stream": False}
    made = http.post("/api/chat", json=body | {"options": {"num_predict": 1, **ignored}})
    assert made.headers["x-treeline-ignored"] == "keep_alive, options.num_ctx, options.mirostat, options.repeat_last_n"


def test_an_unlimited_answer_fills_the_context(client: ollama.Client, http: httpx.Client) -> None:
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    words: list[Any] = [{"role": "user", "content": "word " * ((context - 40) // 3)}]
    for most in (None, -1, -2, 100_000):
        made = client.chat("random", words, options={} if most is None else {"num_predict": most})
        assert (made.prompt_eval_count or 0) + (made.eval_count or 0) in (context - 3, context)
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.chat("random", [{"role": "user", "content": "word " * context}])


def test_the_last_message_of_an_assistant_is_continued(client: ollama.Client, http: httpx.Client) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    theirs = chat_of(http, begun, max_tokens=1, continue_final_message=True, add_generation_prompt=False)
    made = client.chat("random", begun, options={"num_predict": 1})
    assert made.prompt_eval_count == theirs["usage"]["prompt_tokens"]


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_chat_of_one_message(client: ollama.Client, http: httpx.Client) -> None:
    theirs = chat_of(http, [{"role": "system", "content": "S"}, *MESSAGES], max_tokens=7)
    made = client.generate("random", "hello world", system="S", options={"num_predict": 7})
    assert made.response == theirs["choices"][0]["message"]["content"]
    assert (made.prompt_eval_count, made.eval_count) == (theirs["usage"]["prompt_tokens"], 7)
    parts = list(client.generate("random", "hello world", system="S", options={"num_predict": 7}, stream=True))
    assert "".join(part.response or "" for part in parts) == made.response


def test_a_raw_prompt_is_continued_as_it_is(client: ollama.Client, http: httpx.Client) -> None:
    theirs = http.post("/v1/completions", json={"prompt": "hello world", "max_tokens": 2}).json()
    made = client.generate("random", "hello world", raw=True, options={"num_predict": 2})
    assert made.response == theirs["choices"][0]["text"]
    assert made.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    parts = list(client.generate("random", "hello world", raw=True, options={"num_predict": 2}, stream=True))
    assert "".join(part.response or "" for part in parts) == made.response
    with pytest.raises(ollama.ResponseError, match=r"'system'.*raw"):
        client.generate("random", "hello world", raw=True, system="S")


def test_large_prompts_are_read_in_another_process(client: ollama.Client, http: httpx.Client) -> None:
    text = "hello world " * 900
    theirs = [
        http.post("/v1/completions", json={"prompt": text, "max_tokens": 2}).json(),
        chat_of(http, [{"role": "user", "content": text}], max_tokens=2),
    ]
    for raw, expected in zip((True, False), theirs, strict=True):
        made = client.generate("random:latest", text, raw=raw, options={"num_predict": 2})
        assert (made.prompt_eval_count, made.done_reason) == (expected["usage"]["prompt_tokens"], "length")


def test_an_empty_prompt_says_that_the_model_is_loaded(client: ollama.Client) -> None:
    generated, chatted = client.generate("random", ""), client.chat("random", [])
    assert (generated.done, generated.done_reason, generated.response) == (True, "load", "")
    assert (chatted.done, chatted.done_reason, chatted.message.content) == (True, "load", "")


# ---- models ---------------------------------------------------------------------------------------------------------


def test_the_models_are_listed_with_their_facts(client: ollama.Client, http: httpx.Client) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == "random"
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert running.context_length == context
    shown = client.show("random:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == context
    assert shown.capabilities == ["completion"]
    assert http.get("/api/version").json().keys() == {"version"}


def test_a_model_may_be_named_with_the_tag_latest(client: ollama.Client) -> None:
    assert client.chat("random:latest", MESSAGES, options={"num_predict": 1}).model == "random"
    for wrong in ("random:7b", "latest", "other"):
        for ask in (client.show, lambda name: client.chat(name, MESSAGES), lambda name: client.generate(name, "hi")):
            with pytest.raises(ollama.ResponseError, match=wrong) as refused:
                ask(wrong)
            assert refused.value.status_code == 404


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        ("/api/chat", {"messages": "hi"}, "messages"),
        ("/api/chat", {"messages": [{"content": "hi"}]}, "messages[0]"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [5]}]}, "images"),
        ("/api/chat", {"messages": [{**MESSAGES[0], "images": ["aGk="]}]}, "messages"),
        ("/api/generate", {"prompt": "hi", "images": ["aGk="]}, "prompt"),
        ("/api/chat", {"messages": MESSAGES, "think": "much"}, "think"),
        ("/api/chat", {"messages": MESSAGES, "format": 5}, "format"),
        ("/api/chat", {"messages": MESSAGES, "logprobs": True}, "logprobs"),
        ("/api/chat", {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            "/api/chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": 5}}]}]},
            "tool_calls",
        ),
        ("/api/chat", {"messages": MESSAGES, "prompt": "hi"}, "prompt"),
        ("/api/generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "hi", "suffix": "x"}, "suffix"),
        ("/api/generate", {"prompt": "hi", "context": [1]}, "context"),
        ("/api/generate", {"prompt": ["hi"]}, "prompt"),
        ("/api/generate", {"prompt": "hi", "raw": True, "images": ["aGk="]}, "images"),
    ],
)
def test_a_wrong_field_is_named_in_ollamas_format(
    http: httpx.Client, judge: Judge, path: str, asked: dict[str, Any], named: str
) -> None:
    refused = http.post(path, json={"model": "random", **asked})
    assert refused.status_code == 400, refused.text
    judge.error("OllamaError").validate(refused.json())
    assert named in refused.json()["error"]


def test_errors_before_and_beside_the_body_have_ollamas_format(http: httpx.Client) -> None:
    for made, status in (
        (http.post("/api/chat", content=b"{"), 400),
        (http.post("/api/chat", json={"messages": MESSAGES}), 400),
        (http.get("/api/generate"), 405),
        (http.post("/api/show", json={}), 400),
    ):
        assert made.status_code == status
        assert list(made.json()) == ["error"]
        assert isinstance(made.json()["error"], str)


def test_the_key_is_needed_for_every_path(keyed: ServerProcess) -> None:
    with keyed.client() as http:
        for path, body in (
            ("/api/chat", {"messages": MESSAGES}),
            ("/api/generate", {"prompt": "x"}),
            ("/api/show", {}),
        ):
            assert http.post(path, json={"model": "mine", **body}).status_code == 401
        for path in ("/api/tags", "/api/ps", "/api/version"):
            assert (http.get(path).status_code, list(http.get(path).json())) == (401, ["error"])
    with ollama.Client(host=keyed.url, headers={"Authorization": "Bearer correct-horse"}) as client:
        assert client.list().models[0].model == "mine"
        assert client.chat("mine:latest", MESSAGES, options={"num_predict": 1}).done
