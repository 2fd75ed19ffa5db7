"""The main job: OpenAI requests through a real Envoy, each to the runtime that holds its prefix."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from support.metrics_page import compare
from support.prompts import messages, text
from support.stack import Stack, until
from treeline_tools import metrics
from treeline_wire import headers

pytestmark = pytest.mark.integration


def chat(client: OpenAI, question: str, **options):
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": question}], temperature=0, **options
    )


def test_a_chat_is_answered_sensibly(client: OpenAI):
    answer = chat(client, "What is the capital of France?")
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: OpenAI):
    whole = chat(client, "What is 17 + 25?").choices[0].message.content
    chunks = list(chat(client, "What is 17 + 25?", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_are_served_whole_and_streamed(client: OpenAI):
    ask = {"model": "tiny", "prompt": "Red and blue", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
    assert streamed == whole


def test_the_models_are_listed_and_an_unknown_one_is_not_found(client: OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError) as refusal:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hello"}])
    assert refusal.value.body["code"] == "model_not_found"


def test_the_runtimes_metrics_equal_the_page(stack: Stack, client: OpenAI):
    chat(client, "What is 17 + 25?")
    listed = metrics.families()
    for name, process in stack.processes.items():
        if name != "envoy":
            page = stack.http.get("http://{}:{}/metrics".format(*process.spec.ports["metrics-port"])).text
            absent = compare(page, listed["picker" if name == "picker" else "runtime"])
            assert not {one for one in absent if one.startswith("treeline:")}, name


def test_the_gateway_exposes_no_administration_of_a_runtime(stack: Stack, client: OpenAI):
    ask = {"model": "tiny", "prompt": "Count: one two", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**ask, stream=True)
    first = next(iter(stream))
    for _ in stack.runtimes:
        for method, path, body in (
            ("POST", "/abort_request", {"abort_all": True}),
            ("POST", "/abort_request", {"rid": first.id}),
            ("POST", "/flush_cache", None),
            ("GET", "/debug/radix", None),
            ("GET", "/metrics", None),
        ):
            assert stack.http.request(method, stack.url + path, json=body).status_code == 404
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length", "the stream was not interrupted"
    for name in stack.runtimes:
        use = stack.processes[name].spec.ports
        page = stack.http.get("http://{}:{}/metrics".format(*use["metrics-port"])).text
        assert "treeline:num_running_reqs" in page
        flushed = stack.http.post("http://{}:{}/flush_cache?timeout=10".format(*use["admin-port"]))
        assert flushed.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("max_tokens", -1),
        ("messages", []),
        ("audio", {"voice": "x", "format": "wav"}),
    ],
)
def test_unsupported_requests_are_refused_with_the_name_of_the_field(stack: Stack, field, value):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], field: value}
    answer = stack.http.post(f"{stack.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_two_prompts_that_share_two_thousand_tokens_meet_on_one_runtime(stack: Stack, seed: int):
    shared = text(1_000, seed=seed)

    def ask(question: str) -> httpx.Response:
        body = {"model": "tiny", "messages": messages(shared, question), "max_tokens": 4}
        return stack.http.post(f"{stack.url}/v1/chat/completions", json=body).raise_for_status()

    first, second = ask("What is the capital of Italy?"), ask("What colour is the sky?")
    assert second.headers[headers.ENDPOINT] == first.headers[headers.ENDPOINT]
    usage = second.json()["usage"]
    assert usage["prompt_tokens"] > 2_000
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2_000
    assert int(second.headers[headers.CACHED_TOKENS]) == usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.deep
async def test_two_hundred_requests_of_sixteen_clients_over_eight_prefixes(stack: Stack, aclient: AsyncOpenAI):
    """Every request is answered, and after the first of each prefix nearly all of every prompt comes from a cache."""
    prefixes = [text(300, seed=100 + index) for index in range(8)]
    todo = iter(range(200))
    usages = []

    async def one_client() -> None:
        for number in todo:
            answer = await aclient.chat.completions.create(
                model="tiny",
                messages=messages(prefixes[number % 8], f"What is {number % 90} + {number % 7}?"),
                max_tokens=8,
                temperature=0,
            )
            assert answer.choices[0].finish_reason in ("stop", "length")
            usages.append(answer.usage)

    await asyncio.gather(*(one_client() for _ in range(16)))
    assert len(usages) == 200
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    prompt = sum(usage.prompt_tokens for usage in usages)
    assert cached / prompt > 0.8
    for name in stack.runtimes:
        stack.agree(name, timeout_s=60)


def test_a_client_that_goes_away_frees_its_pages(stack: Stack):
    """A long stream is dropped after its first chunk; soon the runtime reports no running requests."""
    body = {
        "model": "tiny",
        "prompt": text(50, seed=7),
        "max_tokens": 4_000,
        "ignore_eos": True,
        "stream": True,
    }
    with stack.http.stream("POST", f"{stack.url}/v1/completions", json=body) as answer:
        served_by = answer.headers[headers.ENDPOINT]
        next(answer.iter_lines())

    def idle() -> bool:
        loads = stack.http.get(f"http://{served_by}/v1/loads").json()["loads"]
        return all(load["num_running_reqs"] == 0 for load in loads)

    until(idle, "the abandoned request is gone")
