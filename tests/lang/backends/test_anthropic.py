"""Anthropic's API: requests and answers, with a server that answers in the published format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic.types
import pytest
from pydantic import TypeAdapter
from support.fake_openai import FakeOpenAI, serving, whole_answer
from treeline_lang import (
    Anthropic,
    BackendError,
    Refused,
    Unsupported,
    assistant,
    function,
    gen,
    image,
    select,
    system,
    user,
)
from treeline_lang.state import ProgramState

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 5}


def message(*texts: str, **members: Any) -> dict[str, Any]:
    made = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": text} for text in texts],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    } | members
    anthropic.types.Message.model_validate(made)
    return made


def events(*given: dict[str, Any]) -> Iterator[bytes]:
    """Return events by their type, as the package itself writes them."""
    for one in given:
        if one["type"] not in ("ping", "error"):
            TypeAdapter(anthropic.types.RawMessageStreamEvent).validate_python(one)
        yield f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode()


def streamed(*texts: str, stop: dict[str, Any] | None = None) -> Iterator[bytes]:
    start = message(stop_reason=None, usage={"input_tokens": 3, "output_tokens": 1})
    delta = {"stop_reason": "end_turn", "stop_sequence": None} | (stop or {})
    yield from events(
        {"type": "message_start", "message": start},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in texts),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with serving(lambda _: whole_answer(message("Hel", "lo"))) as fake:
        yield fake


def backend(server: FakeOpenAI, **options: Any) -> Anthropic:
    return Anthropic(model="m", url=server.url, **options)


def program(*before: Any, **options: Any) -> Any:
    @function
    def one(s: ProgramState) -> None:
        for piece in before:
            s += piece
        s += user("Hi") + assistant(gen("x", **options))

    return one


def test_a_message(server: FakeOpenAI) -> None:
    with backend(server, api_key="secret") as api:
        state = program(system("Be brief."), max_tokens=9, stop=["END"]).run(backend=api, temperature=0.5, top_k=3)
        assert state["x"] == "Hello"
    assert server.bodies == [
        {
            "model": "m",
            "max_tokens": 9,
            "temperature": 0.5,
            "top_k": 3,
            "stop_sequences": ["END"],
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "Hi"}],
        }
    ]
    assert "x-api-key: secret" in server.heads[0]
    assert "anthropic-version: 2023-06-01" in server.heads[0]
    assert state.get_meta_info("x") == {
        "id": "msg_1",
        "finish_reason": {"type": "stop", "matched": None},
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "completion_tokens": 5,
    }


def test_the_address_is_read_from_the_environment(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    with Anthropic(model="m") as api:
        assert program().run(backend=api)["x"] == "Hello"


@pytest.mark.parametrize(
    ("members", "finish"),
    [
        ({"stop_reason": "stop_sequence", "stop_sequence": "END"}, {"type": "stop", "matched": "END"}),
        ({"stop_reason": "max_tokens"}, {"type": "length", "length": 5}),
        ({"stop_reason": "refusal"}, {"type": "refusal"}),
    ],
)
def test_finish_reasons_are_translated(server: FakeOpenAI, members: dict[str, Any], finish: dict[str, Any]) -> None:
    server.answer = lambda _: whole_answer(message("a", **members))
    with backend(server) as api:
        assert program().run(backend=api).get_meta_info("x")["finish_reason"] == finish


def test_a_turn_that_has_begun_and_pictures(server: FakeOpenAI) -> None:
    @function
    def begun(s: ProgramState) -> None:
        s += user(image(PNG) + image("https://example.com/a.png") + "Hi") + assistant("Well: " + gen("x"))

    with backend(server) as api:
        assert begun.run(backend=api).messages()[-1]["content"] == "Well: Hello"
    asked, prefilled = server.bodies[0]["messages"]
    assert prefilled == {"role": "assistant", "content": "Well: "}
    assert [block["type"] for block in asked["content"]] == ["image", "image", "text"]
    own, fetched = (block["source"] for block in asked["content"][:2])
    assert (own["type"], own["media_type"]) == ("base64", "image/png")
    assert fetched == {"type": "url", "url": "https://example.com/a.png"}
    TypeAdapter(list[anthropic.types.MessageParam]).validate_python(server.bodies[0]["messages"])


def test_streams(server: FakeOpenAI) -> None:
    server.answer = lambda _: streamed("Hel", "lo", stop={"stop_reason": "max_tokens"})
    with backend(server) as api:
        state = program().run(backend=api, stream=True)
        assert "".join(state.text_iter("x")) == "Hello"
        meta = state.get_meta_info("x")
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 2)
        assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert server.bodies[0]["stream"] is True


def test_failures(server: FakeOpenAI) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    cases: list[tuple[Any, type[BackendError], str]] = [
        (lambda _: events(error), BackendError, "Overloaded"),
        (lambda _: iter(list(streamed("a"))[:4]), BackendError, "broke off"),
        (
            lambda _: events({"type": "message_start", "message": message()}, {"type": "ping"}),
            BackendError,
            "broke off",
        ),
        (lambda _: whole_answer(error | {"type": "error"}, 400), Refused, "Overloaded"),
    ]
    with backend(server) as api:
        for answer, kind, said in cases:
            server.answer = answer
            found = program().run(backend=api, stream=True).error()
            assert isinstance(found, kind)
            assert said in str(found)
        server.answer = lambda _: whole_answer({"content": 3})
        assert isinstance(program().run(backend=api).error(), BackendError)


def test_an_overloaded_server_is_asked_again(server: FakeOpenAI) -> None:
    busy = b"HTTP/1.1 529 x\r\nretry-after: 0\r\ncontent-length: 2\r\n\r\n{}"
    server.answer = lambda _: busy if len(server.bodies) == 1 else whole_answer(message("a"))
    with backend(server) as api:
        assert program().run(backend=api)["x"] == "a"
    assert len(server.bodies) == 2


def test_unsupported_features_of_the_api_are_refused(server: FakeOpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"regex": "a"}, "json_schema"),
        ({"dtype": "int"}, "json_schema"),
        ({"n": 2}, "fork"),
        ({"return_logprob": True}, "logprobs"),
        ({"min_p": 0.1}, "min_p"),
        ({"choices": ["a", "b"]}, "cannot select"),
    ]
    with backend(server) as api:
        for options, said in refused:
            error = program(**options).run(backend=api).error()
            assert isinstance(error, Unsupported), options
            assert said in str(error)
        late = program(user("a"), assistant("b"), system("c")).run(backend=api).error()
        assert "system(…) before" in str(late)

        @function
        def choosing(s: ProgramState) -> None:
            s += user("?") + assistant(select("x", ["a", "b"]))

        assert isinstance(choosing.run(backend=api).error(), Unsupported)
        assert not server.bodies
        program(json_schema={"type": "object"}, return_logprob=False).run(backend=api).text()
    assert server.bodies[0]["output_config"] == {"format": {"type": "json_schema", "schema": {"type": "object"}}}
