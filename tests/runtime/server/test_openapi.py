"""The OpenAPI document and its page, compared with the fields that are read and the answers that are given."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.openapi import Judge, Schema
from support.runtime_server import ServerProcess, sse
from treeline_runtime.server import native_fields as native
from treeline_runtime.server import openai
from treeline_runtime.server import pooling_reader as pooling
from treeline_runtime.server.apis import anthropic_fields, ollama_fields, ollama_models, responses_fields
from treeline_runtime.server.docs_page import docs_page
from treeline_runtime.server.fields import NEUTRAL, ON_BY_DEFAULT, Body


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Schema:
    answer = http.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    return dict(answer.json())


@pytest.fixture(scope="module")
def judge(document: Schema) -> Judge:
    return Judge(document)


# ---- the document and what the readers read -------------------------------------------------------------------------

BODIES: tuple[type[Body], ...] = (
    openai.ChatBody,
    openai.CompletionBody,
    openai.StreamOptions,
    responses_fields.ResponsesBody,
    anthropic_fields.MessagesBody,
    ollama_fields.OllamaChatBody,
    ollama_fields.OllamaGenerateBody,
    ollama_fields.OllamaOptions,
    ollama_models.OllamaShowBody,
    native.GenerateBody,
    native.NativeSampling,
    native.TokenizeBody,
    native.DetokenizeBody,
    pooling.EmbeddingBody,
    pooling.PoolingBody,
    pooling.ClassifyBody,
    pooling.ScoreBody,
    pooling.RerankBody,
    pooling.DocumentBody,
)


@pytest.mark.parametrize("body", BODIES)
def test_documented_bodies_have_the_readers_fields(document: Schema, body: type[Body]) -> None:
    known = set(body.__struct_fields__)
    told = document["components"]["schemas"][body.__name__]["properties"]
    assert set(told) == known | set(body.harmless) | set(NEUTRAL) | ON_BY_DEFAULT
    for field in set(body.harmless) - known:
        assert "type" not in told[field]
        assert told[field]["description"].startswith("Changes nothing")
    for field in set(NEUTRAL) - known:
        assert told[field] == {"enum": [None, False, [], {}, *NEUTRAL[field]]}
    for field in ON_BY_DEFAULT - known:
        assert told[field] == {"enum": [None, [], {}]}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO: Schema = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ASK: Schema = {"input": "hi", "max_output_tokens": 1}
HI: Schema = {"prompt": "hi", "max_tokens": 1}
TEXT: Schema = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
SAID: list[tuple[str, Schema]] = [
    (CHAT, HELLO),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 2, "seed": -1, "stop": ["a", "b"], "n": 2}),
    (CHAT, HELLO | {"user": 7, "metadata": {"a": []}, "tool_choice": "auto", "tools": [], "unheard": None}),
    (CHAT, HELLO | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    (CHAT, HELLO | {"max_tokens": 0}),
    (CHAT, HELLO | {"max_tokens": 1.0, "temperature": 1}),
    (CHAT, HELLO | {"max_tokens": "1"}),
    (CHAT, HELLO | {"messages": []}),
    (CHAT, HELLO | {"messages": "hi"}),
    (CHAT, HELLO | {"messages": [{"content": "hi"}]}),
    (CHAT, {"max_tokens": 1}),
    (CHAT, HELLO | {"tool_choice": "requested"}),
    (CHAT, HELLO | {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, HELLO | {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f g"}}]}),
    (CHAT, HELLO | {"tool_choice": "none", "tools": [{"type": "function", "function": {"parameters": {}}}]}),
    (CHAT, HELLO | {"parallel_tool_calls": 1}),
    (CHAT, HELLO | {"separate_reasoning": False, "stream_reasoning": None, "include_reasoning": "no"}),
    (CHAT, HELLO | {"response_format": {"type": "json_object"}}),
    (CHAT, HELLO | {"response_format": []}),
    (CHAT, HELLO | {"json_schema": {}}),
    (CHAT, HELLO | {"guided_json": "{}"}),
    (CHAT, HELLO | {"guided_json": False}),
    (CHAT, HELLO | {"guided_choice": ["a", "b"]}),
    (CHAT, HELLO | {"choice": ["a", 1]}),
    (COMPLETION, HI | {"guided_regex": "a+"}),
    (COMPLETION, HI | {"structured_outputs": {"regex": "a+"}}),
    (COMPLETION, HI | {"structured_outputs": "a+"}),
    (COMPLETION, HI | {"tools": [{}]}),
    (CHAT, HELLO | {"unheard": 1}),
    (CHAT, HELLO | {"reasoning_effort": "none"}),
    (CHAT, HELLO | {"cache_salt": 5}),
    (CHAT, HELLO | {"cache_salt": "x" * 1025}),
    (CHAT, HELLO | {"documents": [], "add_generation_prompt": False, "chat_template_kwargs": {}}),
    (CHAT, HELLO | {"documents": {}}),
    (CHAT, HELLO | {"continue_final_message": 1}),
    (CHAT, HELLO | {"chat_template_kwargs": []}),
    (CHAT, HELLO | {"tools": {}}),
    (COMPLETION, HI),
    (COMPLETION, HI | {"prompt": [1, 2, 3], "echo": True, "logprobs": 0, "logit_bias": {"1": -100}}),
    (COMPLETION, HI | {"prompt": ["a", "b"], "logprobs": False, "best_of": 1, "suffix": ""}),
    (COMPLETION, HI | {"prompt": [[1], [2]], "stream_options": None, "cache_salt": "mine"}),
    (COMPLETION, HI | {"prompt": None}),
    (COMPLETION, HI | {"prompt": {}}),
    (COMPLETION, HI | {"prompt": [None]}),
    (COMPLETION, HI | {"logprobs": True}),
    (COMPLETION, HI | {"logprobs": 21}),
    (COMPLETION, HI | {"best_of": 2}),
    (COMPLETION, HI | {"suffix": "x"}),
    (COMPLETION, HI | {"top_p": 0}),
    (COMPLETION, HI | {"temperature": -1}),
    (COMPLETION, HI | {"logit_bias": {"1": 101}}),
    (COMPLETION, HI | {"stream": True, "stream_options": {"include_usage": True, "unheard": False}}),
    (COMPLETION, HI | {"stream": True, "stream_options": {"include_usage": 1}}),
    (COMPLETION, HI | {"stream": True, "stream_options": {"unheard": 1}}),
    (RESPONSES, ASK),
    (RESPONSES, ASK | {"input": [{"role": "user", "content": "hi"}], "store": True, "metadata": {"a": "b"}}),
    (RESPONSES, ASK | {"metadata": {"a": 1}}),
    (RESPONSES, ASK | {"metadata": {str(i): "x" for i in range(17)}}),
    (RESPONSES, ASK | {"input": 5}),
    (RESPONSES, ASK | {"input": None}),
    (RESPONSES, ASK | {"previous_response_id": "resp_1"}),
    (RESPONSES, ASK | {"background": True}),
    (RESPONSES, ASK | {"background": False, "truncation": "disabled", "max_tool_calls": 5}),
    (RESPONSES, ASK | {"truncation": "auto"}),
    (RESPONSES, ASK | {"top_logprobs": 1}),
    (RESPONSES, ASK | {"n": 2}),
    (RESPONSES, ASK | {"n": 1, "temperature": 0.5, "top_k": 3, "seed": 7, "stop": "x"}),
    (RESPONSES, ASK | {"max_output_tokens": 0}),
    (RESPONSES, ASK | {"conversation": "c"}),
    (MESSAGES, HELLO),
    (MESSAGES, HELLO | {"system": "S", "stop_sequences": ["x"], "top_k": 5, "service_tier": "auto"}),
    (MESSAGES, HELLO | {"messages": []}),
    (MESSAGES, HELLO | {"messages": [{"role": "tool", "content": "hi"}]}),
    (MESSAGES, HELLO | {"max_tokens": 0}),
    (MESSAGES, HELLO | {"n": 2}),
    (MESSAGES, HELLO | {"stop": "x"}),
    (MESSAGES, HELLO | {"container": "c"}),
    (MESSAGES, HELLO | {"system": 5}),
    ("/generate", TEXT),
    ("/generate", TEXT | {"text": ["a", "b"], "return_logprob": [True, False], "stream_options": 5}),
    ("/generate", {"input_ids": [[1], [2]], "sampling_params": [{"max_new_tokens": 1}, None]}),
    ("/generate", TEXT | {"sampling_params": {"max_new_tokens": 1, "top_k": 5, "regex": None}}),
    ("/generate", TEXT | {"sampling_params": {"max_new_tokens": 1, "regex": "a+"}}),
    ("/generate", TEXT | {"sampling_params": {"regex": ["a+"]}}),
    ("/generate", TEXT | {"sampling_params": {"guided_regex": "a+"}}),
    ("/generate", TEXT | {"sampling_params": {"temperature": -1}}),
    ("/generate", TEXT | {"sampling_params": 5}),
    ("/generate", TEXT | {"rid": ""}),
    ("/generate", TEXT | {"audio_data": "x"}),
    ("/tokenize", {"prompt": ["a", "b"], "add_special_tokens": False}),
    ("/tokenize", {"messages": HELLO["messages"], "add_generation_prompt": True}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {"tokens": [1, 2], "skip_special_tokens": True}),
    ("/detokenize", {"tokens": [[1], [2]]}),
    ("/detokenize", {"tokens": ["a"]} | {"unheard": 1}),
    ("/detokenize", {}),
]


@pytest.mark.parametrize(("path", "body"), SAID, ids=str)
def test_the_document_and_the_reader_agree_on_a_body(
    http: httpx.Client, document: Schema, path: str, body: Schema
) -> None:
    valid = Judge(document, closed=False).body(path).is_valid(body)
    answer = http.post(path, json=body)
    assert answer.status_code == (200 if valid else 400), answer.text


# ---- the document and what is answered ------------------------------------------------------------------------------


def test_the_document_has_exactly_the_paths_and_methods(http: httpx.Client, document: Schema) -> None:
    assert {CHAT, COMPLETION, "/generate", "/v1/models", "/server_info", "/ready"} < set(document["paths"])
    for path, operations in document["paths"].items():
        (method,) = operations
        where = path.format(model="random")
        answer = http.request(method, where, json={} if method == "post" else None)
        assert answer.status_code in (200, 400), (path, answer.text)
        refused = http.delete(where)
        assert (refused.status_code, refused.headers["allow"]) == (405, method.upper())


def test_operation_ids_are_distinct_names(document: Schema) -> None:
    ids = [found["operationId"] for operations in document["paths"].values() for found in operations.values()]
    assert all(id.isidentifier() for id in ids)
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere(document: Schema) -> None:
    """FastAPI's schemas of bodies that it validates itself are not in the document."""
    assert document["openapi"].startswith("3.1")

    def references(value: Any) -> Iterator[str]:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(item)
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            yield value["$ref"]

    schemas = document["components"]["schemas"]
    named = set(references(document))
    assert named == {f"#/components/schemas/{name}" for name in schemas}, "neither missing nor left over"
    assert "HTTPValidationError" not in schemas


MANY = {"n": 2, "max_tokens": 5}
ASKED: list[tuple[str, Schema]] = [
    (CHAT, HELLO),
    (CHAT, HELLO | MANY | {"logprobs": True, "top_logprobs": 2}),
    (COMPLETION, HI),
    (COMPLETION, HI | MANY | {"prompt": ["a", "b"], "echo": True, "logprobs": 2}),
    (RESPONSES, ASK | {"max_output_tokens": 9}),
    (MESSAGES, HELLO | {"max_tokens": 9}),
    ("/generate", TEXT),
    ("/generate", TEXT | {"text": ["a", "b"]}),
    ("/generate", TEXT | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"prompt": ["a", "b"]}),
    ("/detokenize", {"tokens": [1]}),
    ("/detokenize", {"tokens": [[1], [2]]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_answers_match_the_document(http: httpx.Client, judge: Judge, path: str, body: Schema) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    judge.answer(path).validate(answer.json())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/live", "/ready", "/health_generate"])
def test_server_info_matches_the_openapi_document(http: httpx.Client, judge: Judge, path: str) -> None:
    judge.answer(path, method="get").validate(http.get(path.format(model="random")).json())


STREAMED = [(path, body) for path, body in ASKED if path not in ("/tokenize", "/detokenize")] + [
    (path, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    for path, body in ((CHAT, HELLO), (COMPLETION, HI | MANY))
]


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=str)
def test_events_match_the_document(http: httpx.Client, judge: Judge, path: str, body: Schema) -> None:
    with http.stream("POST", path, json=body | {"stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = sse(stream)
    if path not in (RESPONSES, MESSAGES):
        assert events.pop() == "[DONE]"
    assert events
    for event in events:
        judge.answer(path, kind="text/event-stream").validate(event)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nothing"), ("PUT", CHAT), ("POST", CHAT), ("GET", "/v1/models/other"), ("GET", "/live/")],
)
def test_errors_match_the_document(http: httpx.Client, judge: Judge, method: str, path: str) -> None:
    answer = http.request(method, path)
    assert 400 <= answer.status_code < 500
    judge.error().validate(answer.json())


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
def test_errors_of_anthropics_paths_match_the_document(http: httpx.Client, document: Schema, path: str) -> None:
    default = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]
    assert default["schema"] == {"$ref": "#/components/schemas/AnthropicError"}
    Judge(document).error("AnthropicError").validate(http.post(path, json={}).json())


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_document(http: httpx.Client, document: Schema) -> None:
    page = http.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in page.text
    for name in document["components"]["schemas"]:
        assert f'<div id="{name}">' in page.text
    assert page.text.count("<details") == page.text.count("</details>")
    assert http.head("/docs").status_code == 200
    assert http.post("/docs").status_code == 405


def test_the_page_runs_nothing_and_loads_nothing(http: httpx.Client) -> None:
    page = http.get("/docs")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "script" not in policy
    (style,) = re.findall("<style>(.*?)</style>", page.text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    assert not re.search(r"<script|<link|<img|\ssrc=|\son\w+=|\sstyle=|href=\"(?![#/])", page.text)


def test_texts_of_a_document_are_escaped() -> None:
    hostile = '<script>alert(1)</script>" onclick="x'
    kind = {"type": "object", "description": hostile, "properties": {hostile: {"enum": [hostile]}}}
    operation = {"summary": hostile, "description": hostile, "responses": {"200": {"description": hostile}}}
    page = docs_page(
        {
            "info": {"title": hostile, "version": hostile, "description": hostile},
            "paths": {hostile: {"get": operation | {"parameters": [{"name": hostile, "schema": kind}]}}},
            "components": {"schemas": {hostile: kind, "b": {"$ref": f"#/components/schemas/{hostile}"}}},
        }
    )
    assert "<script" not in page
    assert '" onclick' not in page


def test_the_other_listeners_have_neither_document_nor_page(admin: httpx.Client, metrics: httpx.Client) -> None:
    for client in (admin, metrics):
        assert [client.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404] * 3


def test_document_and_page_need_no_key(keyed: ServerProcess) -> None:
    with keyed.client() as http:
        told = http.get("/openapi.json")
        assert http.get("/docs").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert "correct-horse" not in told.text
        for path, operations in told.json()["paths"].items():
            for method, operation in operations.items():
                where = path.format(model="random")
                needs_key = http.request(method, where, json={} if method == "post" else None).status_code == 401
                assert needs_key == ("security" in operation), path


@pytest.fixture
def counted(fake: ServerProcess) -> str:
    for path in ("/docs", "/openapi.json"):
        httpx.get(fake.url + path, timeout=60)
    return httpx.get(f"{fake.metrics_url}/metrics", timeout=60).text


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_document_and_page_are_counted_by_path(counted: str, path: str) -> None:
    assert any(path in line and 'status="200"' in line for line in counted.splitlines())
