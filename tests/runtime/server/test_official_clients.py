"""OpenAI's and Anthropic's clients beyond single requests: pydantic models, streams parsed as they arrive, tool loops,
histories of the clients' own objects."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from support.runtime_server import ServerProcess, running

pytestmark = [pytest.mark.integration, pytest.mark.deep]

TINY = Path(__file__).parents[3] / "models" / "tiny"
ASK: Any = [{"role": "user", "content": "hi"}]


Colour = enum.Enum("Colour", {"RED": "red", "BLUE": "blue"})


class Part(pydantic.BaseModel):
    """A part."""

    count: int = pydantic.Field(ge=0, le=9)
    kind: Literal["a", "b"]


class Whole(pydantic.BaseModel):
    kind: Colour
    part: Part
    other: Part | None = pydantic.Field(description="another")
    either: Literal[1] | bool
    parts: list[Part] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY) as server:
        yield server


def test_openais_client_parses_chats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 300}
    whole = client.chat.completions.parse(**asked, response_format=Whole)
    assert isinstance(whole.choices[0].message.parsed, Whole)
    with client.chat.completions.stream(**asked, response_format=Whole) as stream:
        snapshots = [event.parsed for event in stream if event.type == "content.delta"]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Whole)
    assert len(snapshots) > 1, "it is parsed as it comes"


def test_openais_client_continues_with_its_own_objects(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Part)]
    asked: dict[str, Any] = {"model": "tiny", "tools": tools, "max_tokens": 200}
    with client.chat.completions.stream(
        **asked, messages=ASK, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Part)
    answered = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    history = [*ASK, message, answered, refused, *ASK]
    last = client.chat.completions.create(**asked | {"max_tokens": 3}, messages=history, tool_choice="none")
    assert last.usage is not None
    said = client.chat.completions.create(
        **asked | {"max_tokens": 3},
        messages=[*history[:-2], {"role": "assistant", "content": "No."}, *ASK],
        tool_choice="none",
    )
    assert said.usage is not None
    assert last.usage.prompt_tokens == said.usage.prompt_tokens, "a refusal is what was said"


def test_openais_client_parses_responses_and_counts_what_it_sends(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi", text_format=Whole, max_output_tokens=300) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Whole)
    function = openai.pydantic_function_tool(Part)["function"]
    tool: Any = {"type": "function", "strict": True, **{name: function[name] for name in ("name", "parameters")}}
    choice: Any = {"type": "function", "name": "Part"}
    made = client.responses.parse(
        model="tiny", input=ASK, tools=[tool], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200
    )
    (call,) = made.output
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "{}"}
    history: Any = [*ASK, *made.output, output]
    last = client.responses.create(model="tiny", input=history, tools=[tool], max_output_tokens=3, tool_choice="auto")
    assert last.usage is not None
    counted = client.responses.input_tokens.count(model="tiny", input=history, tools=[tool], tool_choice="auto")
    assert counted.input_tokens == last.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        client.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_1"}])


def test_anthropics_client_parses_messages(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 300}
    assert isinstance(claude.messages.parse(**asked, output_format=Whole).parsed_output, Whole)
    with claude.messages.stream(**asked, output_format=Whole) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Whole)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_client_runs_tools(claude: anthropic.Anthropic, streamed: bool) -> None:
    asked = list[str]()

    @anthropic.beta_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    runner: Any = claude.beta.messages.tool_runner(
        model="tiny",
        messages=ASK,
        max_tokens=100,
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        stream=streamed,
    )
    turns = [turn.get_final_message() if streamed else turn for turn in runner]
    assert [turn.stop_reason for turn in turns] == ["tool_use"] * 2
    assert asked
    assert set(asked) <= {"Paris", "Rome"}
