"""`/v1/responses` and `/v1/messages` of a running server, as the official clients see them (fake scheduler)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.fake_scheduler import Magic
from support.runtime_server import ServerProcess, let_go, running, sse

MESSAGES: list[Any] = [{"role": "user", "content": "hello world"}]
RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"


def ids(http: httpx.Client, messages: list[Any] = MESSAGES, **more: Any) -> list[int]:
    """Return the token ids of a chat's prompt."""
    tokens: list[int] = http.post("/tokenize", json={"messages": messages, **more}).json()["tokens"]
    return tokens


def text_of(http: httpx.Client, tokens: list[int]) -> str:
    text: str = http.post("/detokenize", json={"tokens": tokens}).json()["text"]
    return text


# ---- answers --------------------------------------------------------------------------------------------------------


def test_a_response_equals_the_answer_of_its_chat(client: openai.OpenAI, http: httpx.Client) -> None:
    prompt = ids(http, [{"role": "system", "content": "S"}, *MESSAGES])
    made = client.responses.create(
        model="random",
        instructions="S",
        input="hello world",
        max_output_tokens=9,
        metadata={"a": "b"},
        temperature=0.5,
        store=True,
    )
    assert made.output_text == text_of(http, prompt[:9])
    assert (made.status, made.incomplete_details and made.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (made.model, made.instructions, made.metadata, made.temperature) == ("random", "S", {"a": "b"}, 0.5)
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(prompt), 9)
    assert made.usage.input_tokens_details.cached_tokens == 3
    assert made.to_dict()["store"] is False, "nothing is stored even on request"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_of_a_response_adds_up_to_the_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "random", "input": "hello world", "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1, "it comes as it is made"
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_a_message_equals_the_answer_of_its_chat(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    prompt = ids(http, [{"role": "system", "content": "S"}, *MESSAGES])
    made = claude.messages.create(model="random", system="S", messages=MESSAGES, max_tokens=9)
    assert [block.to_dict() for block in made.content] == [{"type": "text", "text": text_of(http, prompt[:9])}]
    assert made.stop_reason == "max_tokens"
    assert (made.usage.input_tokens, made.usage.cache_read_input_tokens) == (len(prompt) - 3, 3)
    assert made.usage.output_tokens == 9
    asked: dict[str, Any] = {"model": "random", "messages": MESSAGES, "max_tokens": 9, "system": "S"}
    with claude.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert (final.content[0].to_dict(), final.usage) == (made.content[0].to_dict(), made.usage)


def test_a_stop_sequence_is_reported(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "random", "messages": MESSAGES, "max_tokens": 90, "stop_sequences": ["world"]}
    made = claude.messages.create(**asked)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "world")
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "world")
    assert final.content[0].to_dict() == made.content[0].to_dict()


def test_too_large_a_limit_fills_the_context_of_a_message(
    claude: anthropic.Anthropic, client: openai.OpenAI, http: httpx.Client
) -> None:
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    words = "word " * ((context - 200) // 3)
    asked: list[Any] = [{"role": "user", "content": words}]
    made = claude.messages.create(model="random", messages=asked, max_tokens=100_000, timeout=60)
    assert made.stop_reason == "model_context_window_exceeded"
    assert made.usage.input_tokens + 3 + made.usage.output_tokens == context
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="random", input="hello", max_output_tokens=100_000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_the_token_count_of_a_message_equals_its_prompt(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "random",
        "system": "S",
        "messages": [*MESSAGES, MESSAGES[0] | {"role": "assistant"}],
    }
    counted = claude.messages.count_tokens(**asked).input_tokens
    usage = claude.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_token_count_of_a_response_equals_its_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {
        "model": "random",
        "instructions": "S",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "parallel_tool_calls": False,
        "truncation": "auto",
    }
    counted = client.responses.input_tokens.count(**asked)
    made = client.responses.create(**{**asked, "text": {"format": {"type": "text"}}}, max_output_tokens=1)
    assert made.usage is not None
    assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": made.usage.input_tokens}
    for wrong, param in (
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"personality": "friendly"}, "personality"),
        ({"input": None}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_tokens.count(**{**asked, **wrong})
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(**{**asked, "model": "other"})
    assert http.get("/v1/responses/input_tokens").status_code == 405


def test_an_echo_comes_first_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    asked: dict[str, Any] = {"model": "random", "messages": messages, "max_tokens": 5, "n": 2}
    plain = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    echoed = client.chat.completions.create(**asked, extra_body={"echo": True})
    assert [choice.message.content for choice in echoed.choices] == [f"Well{text}" for text in plain]
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True, extra_body={"echo": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [f"Well{text}" for text in plain]


def test_a_large_body_is_read_in_a_process_with_the_same_result(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    long = "word " * 1200 + "x" * 4000
    large = [{"role": "user", "content": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(model="random", messages=large, max_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="random", input=long)
    assert refused.value.param == "input"
    blank = " " * 9000
    counted = claude.messages.count_tokens(model="random", messages=[{"role": "user", "content": blank}]).input_tokens
    assert counted > 9
    answered = client.responses.create(model="random", input="a", max_output_tokens=3, user=blank)
    assert answered.output_text


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_the_clients_exceptions_of_messages(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "random", "messages": MESSAGES, "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(**asked | {"model": "nope"})
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="'temperature'") as wrong:
        claude.messages.create(**asked, extra_body={"temperature": -1})
    assert wrong.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": wrong.value.body["error"]["message"]},  # type: ignore[index]
    }
    answer = http.post(MESSAGES_PATH, content=b"{")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ServerProcess]:
    """A server with a template that adds nothing: the first token of a prompt is an order to the scheduler."""
    folder = tmp_path_factory.mktemp("models") / "random"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": PLAIN}
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with running(folder, "--no-events", fake=True, environment={"TREELINE_API_KEY": "key"}) as server:
        yield server


def order(server: ServerProcess, magic: int, then: int = 40) -> str:
    """Return the text whose first tokens are these."""
    answer = httpx.post(
        f"{server.url}/detokenize", json={"tokens": [magic, then]}, headers={"x-api-key": "key"}, timeout=60
    )
    return str(answer.json()["text"])


def test_an_error_within_a_stream_is_an_event(scripted: ServerProcess) -> None:
    text, held = order(scripted, Magic.BREAK), order(scripted, Magic.BREAK, Magic.HELD)
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="key", max_retries=0) as client:
        streamed = client.responses.create(model="random", input=held, stream=True)
        let_go(scripted.url)
        *_, last = streamed
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message == "it broke"
        with pytest.raises(openai.InternalServerError, match="it broke"):
            client.responses.create(model="random", input=text)
    with anthropic.Anthropic(base_url=scripted.url, api_key="key", max_retries=0) as claude:
        asked: dict[str, Any] = {"model": "random", "messages": [{"role": "user", "content": held}], "max_tokens": 9}
        with claude.messages.stream(**asked) as stream:
            let_go(scripted.url)
            with pytest.raises(anthropic.APIStatusError, match="it broke"):
                stream.until_done()
        with pytest.raises(anthropic.InternalServerError, match="it broke"):
            claude.messages.create(**asked | {"messages": [{"role": "user", "content": text}]})
    with httpx.stream(
        "POST", scripted.url + MESSAGES_PATH, json=asked | {"stream": True}, headers={"x-api-key": "key"}
    ) as raw:
        let_go(scripted.url)
        *_, error = sse(raw)
    assert error == {"type": "error", "error": {"type": "api_error", "message": "it broke"}}


def test_a_full_queue_is_an_overload(scripted: ServerProcess) -> None:
    text = order(scripted, Magic.REFUSE)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 9, "stream": True}
    answer = httpx.post(scripted.url + MESSAGES_PATH, json=body, headers={"x-api-key": "key"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["x-treeline-overloaded"] == "true"


@pytest.mark.parametrize("path", [MESSAGES_PATH, RESPONSES_PATH, "/v1/chat/completions"])
def test_a_key_is_taken_from_either_header(scripted: ServerProcess, path: str) -> None:
    def status(*headers: tuple[str, str]) -> int:
        return httpx.post(scripted.url + path, json={}, headers=[*headers], timeout=60).status_code

    assert status(("x-api-key", "key"), ("anthropic-version", "2023-06-01")) == 400
    assert status(("authorization", "Bearer key")) == 400
    assert status(("authorization", "Bearer other"), ("x-api-key", "key")) == 400
    for refused in (
        (),
        (("x-api-key", "other"),),
        (("x-api-key", ""),),
        (("x-api-key", "Bearer key"),),
        (("x-api-key", "key"), ("x-api-key", "key")),
    ):
        assert status(*refused) == 401
    answer = httpx.post(scripted.url + path, json={}, timeout=60)
    assert ("type" in answer.json()) == (path == MESSAGES_PATH)
    if path == MESSAGES_PATH:
        assert answer.json()["error"]["type"] == "authentication_error"
