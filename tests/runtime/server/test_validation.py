"""Refusals are 400 (or 404), have OpenAI's shape and name the field."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest
from treeline_wire import headers

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1} | fields)


def text(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(TEXT, json={"prompt": "hi", "max_tokens": 1} | fields)


def refused(answer: httpx.Response, param: str | None, *, status: int = 400, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": []},
        {"functions": None, "function_call": "none"},
        {"logprobs": False, "top_logprobs": None},
        {"modalities": ["text"]},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"prompt_cache_key": "k", "safety_identifier": "s", "parallel_tool_calls": True},
        {"stop": None, "seed": None, "n": None, "stream": None, "logit_bias": {}},
        {"audio": None, "prediction": None, "web_search_options": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "top_p": 1, "temperature": 0},
        {"max_completion_tokens": 1},
        {"stream_options": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"model": None},
        {"priority": 0},
        {"priority": None},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_neutral_values_and_inert_fields_are_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert chat(http, **fields).status_code == 200


WHATEVER_THE_MODEL = {
    "reasoning_effort": "high",
    "verbosity": "low",
    "user": "u",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "x"},
    "priority": 5,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 9000], ids=["read here", "read by another process"])
def test_fields_that_clients_always_send_are_ignored_and_named(http: httpx.Client, length: int, stream: bool) -> None:
    answer = chat(http, stream=stream, **WHATEVER_THE_MODEL | {"metadata": {"a": "x" * length}})
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers[headers.IGNORED].split(", ")) == sorted(WHATEVER_THE_MODEL)


def test_ignored_members_have_full_names_and_no_header_is_sent_for_none(http: httpx.Client) -> None:
    answer = chat(http, stream=True, stream_options={"include_obfuscation": True, "include_usage": True}, user=None)
    assert answer.headers[headers.IGNORED] == "stream_options.include_obfuscation"
    said = {"input": "hi", "text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "max_output_tokens": 1}
    assert http.post("/v1/responses", json=said).headers[headers.IGNORED] == "text.verbosity, reasoning_effort"
    assert http.post("/generate", json={"text": "a", "user": "u"}).headers[headers.IGNORED] == "user"
    assert headers.IGNORED not in chat(http, user=None, metadata={}, n=1).headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("guided_whitespace_pattern", " ?"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("lora_path", "adapter"),
        ("best_of", 2),
        ("best_of", True),
        ("suffix", "x"),
        ("tempratur", 0.5),
        ("return_hidden_states", True),
    ],
    ids=str,
)
def test_any_other_unsupported_field_is_named(http: httpx.Client, field: str, value: Any) -> None:
    refused(chat(http, **{field: value}), field, code="unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("max_completion_tokens", "many"),
        ("n", 0),
        ("n", 1000),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop_token_ids", -1),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [1] * 129),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [1]),
        ("stop_regex", "("),
        ("stop_regex", r"(a)\1"),
        ("stop_regex", ["a"] * 5),
        ("stop_regex", "a{999}"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [999999]),
        ("bad_words", [" "]),
        ("bad_words", ["a"] * 129),
        ("logprobs", 3),
        ("top_logprobs", 5),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "hello"),
        ("messages", None),
        ("model", 5),
        ("rid", ""),
        ("priority", 2**31),
        ("priority", "high"),
        ("priority", 0.5),
        ("cache_salt", 5),
        ("chat_template_kwargs", [1]),
        ("response_format", "text"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools", {}),
        ("parallel_tool_calls", "no"),
        ("separate_reasoning", 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_values_are_named(http: httpx.Client, field: str, value: Any) -> None:
    refused(chat(http, **{field: value}), field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x", "mood": "good"}, "messages[0].mood"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "bold": 1}],
            },
            "messages[0].content[1].bold",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
    ],
    ids=str,
)
def test_wrong_messages_are_named(http: httpx.Client, message: Any, param: str) -> None:
    refused(chat(http, messages=[message]), param)


def test_fields_of_answers_may_return_in_messages(http: httpx.Client) -> None:
    answer = chat(http).json()["choices"][0]["message"]
    history = [
        *MESSAGES,
        answer | {"annotations": [], "audio": None, "function_call": None, "reasoning_content": "hm"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    assert chat(http, messages=history).status_code == 200


def test_contradictions_are_refused(http: httpx.Client) -> None:
    refused(chat(http, max_tokens=1, max_completion_tokens=2), "max_tokens")
    assert chat(http, max_tokens=2, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2
    refused(chat(http, min_tokens=5), "min_tokens")
    options = {"include_usage": True, "reserve_the_gpu": True}
    refused(chat(http, stream=True, stream_options=options), "stream_options.reserve_the_gpu")
    refused(chat(http, continue_final_message=True, add_generation_prompt=True), "continue_final_message")
    refused(chat(http, stream=True, stream_options={"include_usage": "yes"}), "stream_options.include_usage")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", [1, -1]),
        ("prompt", [10**6]),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", ["a", ""]),
        ("prompt", None),
        ("max_tokens", -1),
        ("logprobs", 100),
        ("logprobs", True),
        ("echo", "yes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_completion_values_are_named(http: httpx.Client, field: str, value: Any) -> None:
    refused(text(http, **{field: value}), field)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b'"x"',
        b'{"messages": NaN}',
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"a": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate", "/tokenize", "/detokenize", "/abort_request"])
def test_bad_json_is_refused(http: httpx.Client, admin: httpx.Client, path: str, body: bytes) -> None:
    answer = (admin if path == "/abort_request" else http).post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_missing_parameters_are_named(http: httpx.Client) -> None:
    refused(http.post(CHAT, json={"model": "random"}), "messages", code="missing_required_parameter")
    refused(http.post(TEXT, json={"model": "random"}), "prompt", code="missing_required_parameter")
    refused(http.post("/detokenize", json={}), "tokens", code="missing_required_parameter")


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    refused(chat(http, model="gpt-5"), "model", status=404, code="model_not_found")
    large = {"model": "gpt-5", "messages": [{"role": "user", "content": "hello " * 5000}]}
    for body in ({**large, "messages": []}, large):  # read in this process and in another
        assert http.post(CHAT, json=body).json()["error"]["message"].endswith("access to it. Served: `random`.")
    refused(text(http, model=""), "model", status=404, code="model_not_found")
    refused(http.get("/v1/models/nope"), "model", status=404, code="model_not_found")


def test_a_models_name_in_a_path_may_be_percent_encoded(http: httpx.Client) -> None:
    assert http.get("/v1/models/r%61nd%6Fm").json()["id"] == "random"


def test_an_unknown_model_is_503_if_our_edge_reached_no_picker(http: httpx.Client) -> None:
    """The name may be an InferenceModel's, which only the picker knows, or another pool's model."""
    edge = {headers.EDGE: "true"}
    picked = {**edge, headers.DESTINATION: "10.0.0.1:8000"}
    body = {"model": "alias", "prompt": "hello", "max_tokens": 1}
    chat_body = {"model": "alias", "messages": [{"role": "user", "content": "hello"}]}
    for path, asked in (
        (TEXT, body),
        (CHAT, chat_body),
        ("/tokenize", {"model": "alias", "prompt": "hello"}),
    ):
        answer = http.post(path, json=asked, headers=edge)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "picker_unavailable"
        assert (error["type"], error["param"], "alias" in error["message"]) == (
            "service_unavailable",
            "model",
            True,
        )
        assert answer.headers["retry-after"] == "1"
        assert answer.headers[headers.ELSEWHERE] == "true"
    assert http.get("/v1/models/alias", headers=edge).status_code == 503
    refused(http.post(TEXT, json=body, headers=picked), "model", status=404, code="model_not_found")
    assert http.post(TEXT, json={**body, "model": "random"}, headers=edge).status_code == 200


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(http: httpx.Client) -> None:
    for answer in (
        text(http, prompt=[5] * 5000),
        text(http, prompt=[5] * 4096),
        chat(http, messages=[{"role": "user", "content": "word " * 9000}]),
        http.post("/generate", json={"input_ids": [5] * 5000}),
    ):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]
    refused(text(http, prompt=[5] * 4000, max_tokens=97), "prompt", code="context_length_exceeded")
    assert text(http, prompt=[5] * 4095, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": {"regex": 1}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"guided_regex": "x"}}, "sampling_params.guided_regex"),
        ({"text": "a", "regex": "x"}, "regex"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "session_params": {"id": 1}}, "session_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"text": ["a"] * 9, "sampling_params": {"n": 128}}, "sampling_params.n"),
        ({"input_ids": [[1]] * 1024, "sampling_params": [{"n": 2}] * 1024}, "sampling_params.n"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "logprob_start_len": -5}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens"),
        ({"text": ""}, "text"),
        ({"text": "a", "stream": 1}, "stream"),
    ],
    ids=str,
)
def test_wrong_native_requests_are_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    refused(http.post("/generate", json=body), param)


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    refused(http.get("/v2/nothing"), None, status=404, code="not_found")
    refused(http.get(CHAT), None, status=405, code="method_not_allowed")
    refused(http.post("/v1/audio/speech", json={}), None, status=404)


def test_a_body_that_is_too_large_is_413(http: httpx.Client) -> None:
    assert http.post(TEXT, content=b" " * (33 << 20)).status_code == 413


def test_an_abort_needs_a_request_id(admin: httpx.Client) -> None:
    refused(admin.post("/abort_request", json={}), "rid")
    refused(admin.post("/abort_request", json={"rid": "a", "abort_all": True}), "rid")
    assert admin.post("/abort_request", json={"rid": "unknown"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/v1/rerank", "/classify"])
def test_a_text_model_refuses_vectors_and_names_its_own_paths(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"input": "hi"})
    refused(answer, None, code="unsupported_task")
    assert "makes text. Use /v1/chat/completions" in answer.json()["error"]["message"]
    info = http.get("/server_info").json()
    assert (info["task"], info["pooling"]) == ("generate", None)


HALVES = [r"\ud800", r"\udc00", r"\ud800x", r"\uD83D\uD83D", r"\ude00\ud83d", r"\\\ud800"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages":[{"role":"user","content":"%s"}]}'),
        (CHAT, '{"messages":[{"role":"user","content":"hi"}],"stop":["%s"]}'),
        (CHAT, '{"messages":[{"role":"user","content":"hi"}],"logit_bias":{"%s":1}}'),
        (CHAT, '{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"%s"}}]}'),
        (TEXT, '{"prompt":"%s"}'),
        (TEXT, '{"prompt":"hi","user":"' + 9000 * "a" + '%s"}'),
        ("/generate", '{"text":"hi","rid":"%s"}'),
        ("/v1/responses", '{"input":"%s"}'),
    ],
    ids=["content", "stop", "logit_bias", "tools", "prompt", "large", "rid", "input"],
)
def test_half_of_a_surrogate_pair_is_named_in_every_field(http: httpx.Client, path: str, body: str, half: str) -> None:
    answer = http.post(path, content=(body % half).encode(), headers={"content-type": "application/json"})
    refused(answer, None)
    assert "half of a surrogate pair" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "[1, Infinity]"])
def test_an_invalid_number_in_json_is_named(http: httpx.Client, number: str) -> None:
    answer = http.post(TEXT, content=f'{{"prompt":"a \\ud83d\\ude00", "temperature": {number}}}'.encode())
    refused(answer, None)
    assert "NaN and Infinity" in answer.json()["error"]["message"]


def test_a_truncated_body_is_reported_as_such(http: httpx.Client) -> None:
    answer = http.post(TEXT, content=rb'{"prompt":"NaN \\ud800 \ud83d\ude00')
    refused(answer, None)
    assert "truncated" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/tokenize"])
def test_compressed_bodies_are_415(http: httpx.Client, path: str) -> None:
    answer = http.post(path, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "'gzip' are not read: send JSON as it is" in answer.json()["error"]["message"]
    plain = http.post("/tokenize", json={"prompt": "a"}, headers={"content-encoding": "Identity"})
    assert plain.status_code == 200
