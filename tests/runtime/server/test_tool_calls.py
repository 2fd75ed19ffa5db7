"""Tools, reasoning and structured output through a real server, as the official client sees them. The scheduler has no
model: it repeats the last message (`Magic.SPEAK`), so that the tests choose outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.openapi import Judge
from support.runtime_server import ServerProcess, running, sse
from support.speaking import CALL, NOW, says
from tokenizers import Tokenizer
from treeline_wire.chat import ChatTemplate
from treeline_wire.prompt import prompt_of_chat
from treeline_wire.tokenizer import TokenizerBundle

TINY = Path(__file__).parents[3] / "models" / "tiny"
CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
THOUGHT = "<think>\nWhere is it?\n</think>\n\n"


@pytest.fixture(scope="module")
def server(speaking: ServerProcess) -> ServerProcess:
    return speaking


def called(message: Any) -> list[Any]:
    return list(message.tool_calls or [])


def test_the_formats_are_those_of_the_chat_template(server: ServerProcess, http: httpx.Client) -> None:
    server.wait_for_log("reasoning parser: qwen3; tool call parser: hermes")
    info = http.get("/server_info").json()
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("qwen3", "hermes")
    assert http.get("/model_info").json()["tool_call_parser"] == "hermes"


def test_an_answer_that_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="speaks", messages=says(f"{THOUGHT}I look.\n{CALL}\n{NOW}"), tools=TOOLS
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    first, second = called(choice.message)
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": "Köln"})
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "Where is it?"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert thought is not None
    assert 0 < thought < answer.usage.completion_tokens


def test_a_stream_that_calls_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "speaks",
        "messages": says(f"{THOUGHT}I look.\n{CALL}\n{NOW}"),
        "tools": TOOLS,
        "n": 2,
        "logprobs": True,
    }
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.usage == whole.usage
    for ours, theirs in zip(final.choices, whole.choices, strict=True):
        assert ours.finish_reason == theirs.finish_reason == "tool_calls"
        assert ours.message.content == theirs.message.content
        for call, other in zip(called(ours.message), called(theirs.message), strict=True):
            assert (call.function.name, call.function.arguments) == (other.function.name, other.function.arguments)
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs.content == theirs.logprobs.content
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert sorted(event.name for event in done) == ["now", "now", "weather", "weather"]


def test_the_first_chunk_has_the_role_and_the_last_the_finish_reason(http: httpx.Client) -> None:
    body = {"messages": says(CALL), "tools": TOOLS, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    with http.stream("POST", CHAT, json=body) as response:
        *events, done = sse(response)
    assert done == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    begun = choices[1]["delta"]["tool_calls"][0]
    assert (begun["index"], begun["type"], begun["function"]["name"]) == (0, "function", "weather")
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert not any("content" in choice["delta"] for choice in choices[1:])
    judge = Judge(http.get("/openapi.json").json())
    for event in events:
        judge.answer(CHAT, kind="text/event-stream").validate(event)
    judge.answer(CHAT).validate(http.post(CHAT, json={"messages": says(THOUGHT + CALL), "tools": TOOLS}).json())


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (f"{THOUGHT}It is <|im_start|>warm", {}, ("It is warm", "Where is it?")),
        (
            f"{THOUGHT}It is <|im_start|>warm",
            {"skip_special_tokens": False},
            ("It is <|im_start|>warm", "Where is it?"),
        ),
        (f"{THOUGHT}It is warm", {"include_reasoning": False}, ("It is warm", None)),
        ("Where?</think>Here", {"chat_template_kwargs": {"enable_thinking": True}}, ("Here", "Where?")),
        ("Where?</think>Here", {"reasoning_effort": "low"}, ("Here", "Where?")),
        ("Here", {"reasoning_effort": "none"}, ("Here", None)),
        ("Where?", {"reasoning_effort": "high"}, ("", "Where?")),
        ("It is warm", {"stop": ["warm"]}, ("It is ", None)),
    ],
)
def test_reasoning_is_separate_from_the_answer(
    http: httpx.Client, text: str, fields: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    body = {"messages": says(text), **fields}
    message = http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == expected
    assert message["reasoning"] == message["reasoning_content"]
    with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        *events, _ = sse(response)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == expected[0]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (expected[1] or "")


def test_reasoning_may_stay_in_the_answer(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": says(THOUGHT + "Here"), "separate_reasoning": False})
    message = answer.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": THOUGHT + "Here", "refusal": None}


def test_reasoning_may_come_in_one_piece(http: httpx.Client) -> None:
    body = {"messages": says(THOUGHT + "Here"), "stream": True, "stream_reasoning": False}
    with http.stream("POST", CHAT, json=body) as response:
        *events, _ = sse(response)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["Where is it?"]


def test_text_like_a_call_stays_text_if_calls_are_off(client: openai.OpenAI) -> None:
    for choice in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model="speaks", messages=says("No <call>"), **choice)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "No <call>"
        assert (answer.choices[0].message.tool_calls, answer.choices[0].finish_reason) == (None, "stop")
    one = client.chat.completions.create(
        model="speaks", messages=says(f"{CALL}\n{NOW}"), tools=TOOLS, parallel_tool_calls=False
    )
    assert [call.function.name for call in called(one.choices[0].message)] == ["weather"]


def test_a_conversation_continues_with_the_results(client: openai.OpenAI) -> None:
    asked = says(CALL)
    message = client.chat.completions.create(model="speaks", messages=asked, tools=TOOLS).choices[0].message
    (call,) = called(message)
    history: list[Any] = [
        *asked,
        message,
        {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": [{"type": "text", "text": "Warm."}]},
    ]
    answer = client.chat.completions.create(model="speaks", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "Warm."
    history[1] = message.model_dump(exclude_none=True)
    assert client.chat.completions.create(model="speaks", messages=history).choices[0].message.content == "Warm."


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (5, "messages[0].tool_calls[0]"),
        ({"type": "custom", "custom": {"name": "f", "input": "x"}}, "messages[0].tool_calls[0]"),
        ({"function": {"arguments": "{}"}}, "messages[0].tool_calls[0].function.name"),
        ({"function": {"name": "f", "arguments": 5}}, "messages[0].tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": "{"}}, "messages[0].tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "messages[0].tool_calls[0].function.arguments"),
    ],
    ids=str,
)
def test_an_invalid_call_of_an_earlier_turn_is_named(http: httpx.Client, call: Any, param: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, *says("x")]
    answer = http.post(CHAT, json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.integration
@pytest.mark.deep
def test_the_tiny_model_is_given_the_prompt_that_a_picker_expects() -> None:
    """The model was not made for tools and answers in its own way. Its prompt shows them, the call and the result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "How is the weather in Köln?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Warm."}]},
    ]
    body = {"messages": history, "tools": TOOLS, "reasoning_effort": "none", "max_tokens": 8, "temperature": 0}
    bundle = TokenizerBundle.from_dir(TINY)
    template = ChatTemplate.from_bundle(bundle, inline_seconds=60.0)
    assert template is not None
    expected = Tokenizer.from_str(bundle.tokenizer_json).encode(prompt_of_chat(body, template).text).ids
    with running(TINY, "--no-events") as server, server.client() as http:
        server.wait_for_log("reasoning parser: none; tool call parser: hermes")
        whole = http.post(CHAT, json=body).json()
        assert whole["usage"]["prompt_tokens"] == len(expected)
        shown = {name: body[name] for name in ("messages", "tools")}
        assert http.post("/tokenize", json=shown).json()["tokens"] == expected
        with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            *events, _ = sse(response)
        deltas = [event["choices"][0]["delta"] for event in events]
        message = whole["choices"][0]["message"]
        assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
