"""Tools, reasoning and structured output of `/v1/responses` and `/v1/messages`, through a real server. The scheduler
has no model: it repeats the last message (`Magic.SPEAK`), so that the tests choose outputs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.openapi import Judge
from support.runtime_server import ServerProcess, sse
from support.speaking import CALL, NOW, says

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA},
    {"type": "function", "name": "now"},
]
CLAUDES: list[Any] = [
    {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]
WORK = f"<think>\nWhere is it?\n</think>\n\nI look.\n{CALL}\n{NOW}"


@pytest.fixture(scope="module")
def server(speaking: ServerProcess) -> ServerProcess:
    return speaking


def test_a_response_that_thinks_and_calls(client: openai.OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "speaks", "input": WORK, "tools": TOOLS}
    made = client.responses.create(**asked)
    assert made.status == "completed"
    thought, said, first, second = made.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Where is it?"
    assert (said.type, made.output_text) == ("message", "I look.")
    assert first.type == second.type == "function_call"
    assert (first.name, json.loads(first.arguments)) == ("weather", {"city": "Köln"})
    assert (second.name, second.arguments) == ("now", "{}")
    assert made.usage is not None
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        arguments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert len(arguments) > 2, "as they come"
    assert [item.type for item in final.output] == [item.type for item in made.output]
    assert (final.output_text, final.usage) == (made.output_text, made.usage)
    judge = Judge(http.get("/openapi.json").json())
    judge.answer("/v1/responses").validate(http.post("/v1/responses", json=asked).json())
    with http.stream("POST", "/v1/responses", json=asked | {"stream": True}) as response:
        for event in sse(response):
            judge.answer("/v1/responses", kind="text/event-stream").validate(event)


def test_a_message_that_thinks_and_calls(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "speaks", "messages": says(WORK), "tools": CLAUDES, "max_tokens": 900}
    made = claude.messages.create(**asked)
    assert made.stop_reason == "tool_use"
    thought, said, first, second = [block.to_dict() for block in made.content]
    assert thought == {"type": "thinking", "thinking": "Where is it?", "signature": ""}
    assert said == {"type": "text", "text": "I look."}
    assert (first["name"], first["input"]) == ("weather", {"city": "Köln"})
    assert (second["name"], second["input"]) == ("now", {})
    assert first["id"] != second["id"]
    assert made.usage.output_tokens_details is not None
    assert 0 < made.usage.output_tokens_details.thinking_tokens < made.usage.output_tokens
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    unnamed = [{name: value for name, value in block.to_dict().items() if name != "id"} for block in final.content]
    assert unnamed == [
        {name: value for name, value in one.items() if name != "id"} for one in (thought, said, first, second)
    ]
    assert (final.stop_reason, final.usage) == (made.stop_reason, made.usage)
    judge = Judge(http.get("/openapi.json").json())
    judge.answer("/v1/messages").validate(http.post("/v1/messages", json=asked).json())
    with http.stream("POST", "/v1/messages", json=asked | {"stream": True}) as response:
        for event in sse(response):
            judge.answer("/v1/messages", kind="text/event-stream").validate(event)


def test_an_answer_may_be_sent_back(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    made = client.responses.create(model="speaks", input=WORK, tools=TOOLS)
    items: list[Any] = [*says(WORK), *(item.to_dict() for item in made.output)]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in items
        if item.get("type") == "function_call"
    ]
    again = client.responses.create(model="speaks", input=[*items, *results, *says("Sunny.")], tools=TOOLS)
    assert again.output_text == "Sunny."
    message = claude.messages.create(model="speaks", messages=says(WORK), tools=CLAUDES, max_tokens=900)
    uses = [block.id for block in message.content if block.type == "tool_use"]
    told: list[Any] = [{"type": "tool_result", "tool_use_id": id, "content": "7"} for id in uses]
    turns: list[Any] = [
        *says(WORK),
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {"role": "user", "content": [*told, {"type": "text", "text": "Sunny."}]},
    ]
    final = claude.messages.create(model="speaks", messages=turns, tools=CLAUDES, max_tokens=900)
    assert [block.to_dict() for block in final.content] == [{"type": "text", "text": "Sunny."}]
    assert final.stop_reason == "end_turn"


def test_a_call_of_a_forbidden_tool_is_text(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    made = client.responses.create(model="speaks", input=f"Hi {NOW}", tools=TOOLS, tool_choice="none")
    assert [item.type for item in made.output] == ["message"]
    none: Any = {"type": "none"}
    said = claude.messages.create(
        model="speaks", messages=says(f"Hi {NOW}"), tools=CLAUDES, tool_choice=none, max_tokens=900
    )
    assert ([block.type for block in said.content], said.stop_reason) == (["text"], "end_turn")


def test_only_one_call_is_made_if_parallel_calls_are_off(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    made = client.responses.create(model="speaks", input=f"{CALL}\n{NOW}", tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in made.output] == ["function_call"]
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = claude.messages.create(
        model="speaks", messages=says(f"{CALL}\n{NOW}"), tools=CLAUDES, tool_choice=one, max_tokens=900
    )
    assert [block.type for block in message.content] == ["tool_use"]


def test_thinking_is_turned_on_and_off(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    def kinds(text: str, thinking: Any) -> list[str]:
        made = claude.messages.create(model="speaks", messages=says(text), thinking=thinking, max_tokens=2000)
        return [block.type for block in made.content]

    assert kinds("Where?</think>Here", {"type": "enabled", "budget_tokens": 1024}) == ["thinking", "text"]
    assert kinds("Where?</think>Here", {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}) == ["text"]
    assert kinds("Here", {"type": "disabled"}) == ["text"]
    made = client.responses.create(model="speaks", input="Where?</think>Here", reasoning={"effort": "high"})
    assert [item.type for item in made.output] == ["reasoning", "message"]
