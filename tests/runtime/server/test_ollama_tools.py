"""Tools, thinking and formats of Ollama's API by its official client. The scheduler has no model: it repeats the last
message (`Magic.SPEAK`), so that the tests choose outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from support.openapi import Judge
from support.runtime_server import ServerProcess
from support.speaking import CALL, NOW, says

WORK = f"<think>\nWhere is it?\n</think>\n\nI look.\n{CALL}\n{NOW}"


@pytest.fixture(scope="module")
def server(speaking: ServerProcess) -> ServerProcess:
    return speaking


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"Sunny in {city}."


def now() -> str:
    """The time."""
    return "12:00"


def called(message: ollama.Message) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_a_chat_thinks_and_calls(client: ollama.Client, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "speaks", "messages": says(WORK), "tools": [weather, now]}
    made = client.chat(**asked)
    assert (made.message.thinking, made.message.content) == ("Where is it?", "I look.")
    assert called(made.message) == [("weather", {"city": "Köln"}), ("now", {})]
    assert made.done_reason == "stop"
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == made.message.thinking
    assert "".join(part.message.content or "" for part in parts) == made.message.content
    assert [call for part in parts for call in called(part.message)] == called(made.message)
    judge = Judge(http.get("/openapi.json").json())
    body = {"model": "speaks", "messages": says(WORK), "tools": [{"type": "function", "function": {"name": "now"}}]}
    judge.answer("/api/chat").validate(http.post("/api/chat", json=body | {"stream": False}).json())
    for line in http.post("/api/chat", json=body).text.splitlines():
        judge.answer("/api/chat", kind="application/x-ndjson").validate(json.loads(line))


def test_an_answer_may_be_sent_back(client: ollama.Client) -> None:
    made = client.chat("speaks", says(WORK), tools=[weather, now])
    results = [
        {"role": "tool", "tool_name": call.function.name, "content": "7"} for call in made.message.tool_calls or ()
    ]
    again = client.chat("speaks", [*says(WORK), made.message, *results, *says("Sunny.")], tools=[weather, now])
    assert (again.message.content, again.done_reason) == ("Sunny.", "stop")


def test_a_call_that_was_cut_off_keeps_its_text(client: ollama.Client) -> None:
    made = client.chat("speaks", says(CALL[: CALL.index("Kö")]), tools=[weather])
    assert called(made.message)[0][0] == "weather"
    assert made.message.tool_calls is not None
    assert "raw_arguments" in made.message.tool_calls[0].function.arguments


@pytest.mark.parametrize(("think", "said"), [(True, "<think>\nyes\n</think>\nno"), (False, "no")])
def test_thinking_is_switched_in_the_chat_template(client: ollama.Client, think: bool, said: str) -> None:
    plain = client.chat("speaks", says("x"))
    made = client.chat("speaks", says("x"), think=think)
    assert (made.prompt_eval_count or 0) > (plain.prompt_eval_count or 0), "the template has begun or ended it"
    whole = client.generate("speaks", said.removeprefix("<think>\n") if think else said, think=think)
    assert (whole.thinking, whole.response) == (("yes", "no") if think else (None, "no"))


def test_formats_constrain_the_answer(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for format in ("json", schema):
        made = client.chat("speaks", says('{"a": 5}'), format=format)
        assert json.loads(made.message.content or "") == {"a": 5}


def test_what_the_model_can_is_shown(client: ollama.Client) -> None:
    assert client.show("speaks").capabilities == ["completion", "tools", "thinking"]
