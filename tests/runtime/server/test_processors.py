"""Logit processors in requests: the fields, and a real server with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.runtime_server import ServerProcess, running
from treeline_runtime.args import parse_args
from treeline_runtime.messages import CustomProcessor
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.native_fields import NativeSampling
from treeline_runtime.server.native_fields import read_processor as read_native
from treeline_runtime.server.sampling import MAX_DEPTH, MAX_PARAMS_BYTES, read_processor


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for i in range(levels - 1):
        value = [value] if i % 2 else {"a": value}
    return {"a": value}


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        (None, {}, None),
        (None, {"custom_params": None, "vllm_xargs": {}}, None),
        ("a.b-C_1", {}, CustomProcessor("a.b-C_1")),
        ("a", {"custom_params": {}, "vllm_xargs": None}, CustomProcessor("a")),
        ("a", {"custom_params": {"b": [1, "ü"]}}, CustomProcessor("a", '{"b":[1,"ü"]}')),
        ("a", {"vllm_xargs": {"b": 10**30}}, CustomProcessor("a", '{"b":' + str(10**30) + "}")),
        ("a", {"custom_params": nested(MAX_DEPTH)}, CustomProcessor.of("a", nested(MAX_DEPTH))),
    ],
)
def test_a_processor_is_named(name: str | None, given: dict[str, Any], found: CustomProcessor | None) -> None:
    assert read_processor({"custom_logit_processor": name}, given) == found


@pytest.mark.parametrize(
    ("name", "given", "param", "words"),
    [
        (None, {"custom_params": {"a": 1}}, "custom_params", "Name it as 'custom_logit_processor'"),
        (None, {"vllm_xargs": {"a": 1}}, "vllm_xargs", "which logit processor"),
        ("a", {"custom_params": {"a": 1}, "vllm_xargs": {"a": 1}}, "vllm_xargs", "give one"),
        ('{"callable": "80049540"}', {}, "custom_logit_processor", "--logit-processor NAME=module:attribute"),
        (' {"callable": ', {}, "custom_logit_processor", "cannot contain code"),
        ("", {}, "custom_logit_processor", "a name has"),
        ("a b", {}, "custom_logit_processor", "a name has"),
        ("a" * 65, {}, "custom_logit_processor", "a name has"),
        ("a\n", {}, "custom_logit_processor", "a name has"),
        ("a", {"custom_params": {"a": "x" * MAX_PARAMS_BYTES}}, "custom_params", "larger than"),
        ("a", {"custom_params": nested(MAX_DEPTH + 1)}, "custom_params", "nested more"),
        ("a", {"vllm_xargs": {"a": "\ud800"}}, "vllm_xargs", "surrogate"),
    ],
)
def test_a_value_that_names_no_processor_is_refused(
    name: str | None, given: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_processor({"custom_logit_processor": name}, given)
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == param
    assert words in str(caught.value)


def test_in_generate_a_processor_is_given_once() -> None:
    own = NativeSampling(custom_logit_processor="a", custom_params={"b": 1})
    assert read_native(own, None, {}) == CustomProcessor("a", '{"b":1}')
    assert read_native(NativeSampling(custom_params={"b": 1}), "a", None) == CustomProcessor("a", '{"b":1}')
    for name, params in (("a", None), (None, {"c": 1})):
        with pytest.raises(ApiError, match="give one"):
            read_native(own, name, params)
    with pytest.raises(ApiError) as caught:
        read_native(NativeSampling(), "{}", None)
    assert caught.value.body["error"]["param"] == "custom_logit_processor"


def test_the_flag_is_repeated_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--logit-processor", "a=b.c:D", "--logit-processor=thinking_budget"]
    assert parse_args(["--model", "m", *flags]).logit_processor == ("a=b.c:D", "thinking_budget")
    with pytest.raises(SystemExit):
        parse_args(["--model", "m", "--logit-processor", "a=b" + "/c:D"])
    assert "--logit-processor: expected NAME=module:attribute" in capsys.readouterr().err


# ---- a real server ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    flags = ("--logit-processor=favours=support.processors:Favours", "--logit-processor=fails=support.processors:Fails")
    with running(model, "--no-events", "--logit-processor=disallowed_tokens", *flags) as server:
        yield server


HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def favours(token: int) -> dict[str, Any]:
    return {"custom_logit_processor": "favours", "custom_params": {"token": token}}


@pytest.mark.deep
def test_the_official_client_names_one(client: openai.OpenAI, http: httpx.Client, server: ServerProcess) -> None:
    text = http.post("/detokenize", json={"tokens": [50] * 3}).json()["text"]
    chat = client.chat.completions.create(model="random", messages=HELLO, max_tokens=3, extra_body=favours(50))
    assert chat.choices[0].message.content == text
    whole = client.completions.create(model="random", prompt=["a", "b"], max_tokens=3, n=2, extra_body=favours(50))
    assert [choice.text for choice in whole.choices] == [text] * 4
    stream = client.completions.create(
        model="random",
        prompt="a",
        max_tokens=3,
        stream=True,
        extra_body={"custom_logit_processor": "favours", "vllm_xargs": {"token": 50}},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    imported = [line for line in server.log if "test processors imported" in line]
    assert len(imported) == 1, "by one process"
    assert "scheduler" in imported[0]
    info = http.get("/server_info").json()
    assert "favours=support.processors:Favours" in info["logit_processor"]


@pytest.mark.deep
def test_generate_takes_a_processor_in_sglangs_field(http: httpx.Client) -> None:
    params = {"max_new_tokens": 2, "temperature": 0}
    free = http.post("/generate", json={"text": "a", "sampling_params": params}).json()["output_ids"]
    forced = params | {"custom_params": {"token": 50}}
    body = {"text": "a", "sampling_params": forced, "custom_logit_processor": "favours"}
    assert http.post("/generate", json=body).json()["output_ids"] == [50, 50]
    body = {"text": "a", "sampling_params": params | favours(51)}
    assert http.post("/generate", json=body).json()["output_ids"] == [51, 51]
    several = {
        "text": ["a", "a"],
        "sampling_params": params,
        "custom_logit_processor": [None, "favours"],
        "custom_params": [None, {"token": 52}],
    }
    assert [one["output_ids"] for one in http.post("/generate", json=several).json()] == [free, [52, 52]]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"custom_logit_processor": "other"}, "no logit processor 'other', only disallowed_tokens, favours, fails"),
        (favours(10**6), "token is an id below"),
        ({"custom_logit_processor": '{"callable": "8004"}'}, "requests cannot contain code"),
        ({"custom_logit_processor": 5}, "custom_logit_processor"),
        ({"custom_logit_processor": "favours", "custom_params": [1]}, "custom_params"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_processor_is_a_400(client: openai.OpenAI, fields: dict[str, Any], words: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="random", messages=HELLO, max_tokens=3, stream=stream, extra_body=fields)
    assert words in str(caught.value)


@pytest.mark.deep
def test_a_failing_processor_is_a_500_of_its_request(client: openai.OpenAI) -> None:
    fails = {"custom_logit_processor": "fails", "custom_params": {"how": "raises", "after": 0}}
    with pytest.raises(openai.InternalServerError, match="logit processor 'fails' failed: RuntimeError"):
        client.completions.create(model="random", prompt="a", max_tokens=3, extra_body=fails)
    assert client.completions.create(model="random", prompt="a", max_tokens=3).choices
