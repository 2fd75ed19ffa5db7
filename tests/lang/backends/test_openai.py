"""OpenAI's API: requests and answers, with a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_openai import DONE, FakeOpenAI, delta, serving, usage, whole_answer
from treeline_lang import (
    BackendError,
    OpenAI,
    ProgramError,
    Refused,
    Unreachable,
    Unsupported,
    assistant,
    background,
    function,
    gen,
    image,
    select,
    system,
    user,
)
from treeline_lang.backends.base import Call
from treeline_lang.backends.openai_format import DIALECTS, spoken
from treeline_lang.sampling import Sampling
from treeline_lang.state import ProgramState
from treeline_lang.transcript import Prompt

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


@function
def chat(s: ProgramState, **options: Any) -> None:
    s += system("Be brief.") + user("Hi") + assistant(gen("x", **options))


@function
def text(s: ProgramState, **options: Any) -> None:
    s += "Once" + gen("x", **options)


def chat_answer(*contents: str, **members: Any) -> bytes:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"} | members
        for index, content in enumerate(contents)
    ]
    return whole_answer({"id": "c-1", "choices": choices, "usage": USAGE})


def text_answer(content: str, **members: Any) -> bytes:
    choice = {"index": 0, "text": content, "finish_reason": "length"} | members
    return whole_answer({"id": "t-1", "choices": [choice], "usage": USAGE})


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with serving(lambda body: chat_answer("Hello") if "messages" in body else text_answer(" upon")) as fake:
        yield fake


def backend(server: FakeOpenAI, **options: Any) -> OpenAI:
    return OpenAI(f"{server.url}/v1", model="m", **options)


def test_a_chat(server: FakeOpenAI) -> None:
    server.key = "secret"
    with backend(server, api_key="secret") as openai:
        state = chat.run(backend=openai, temperature=0, top_p=0.5, max_tokens=9, stop="END")
        assert state["x"] == "Hello"
    assert server.bodies == [
        {
            "model": "m",
            "max_completion_tokens": 9,
            "temperature": 0,
            "top_p": 0.5,
            "stop": ["END"],
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        }
    ]
    assert state.messages()[-1] == {"role": "assistant", "content": "Hello"}
    assert state.get_meta_info("x") == {
        "id": "c-1",
        "finish_reason": {"type": "stop", "matched": None},
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "cached_tokens": 4,
    }


def test_a_completion(server: FakeOpenAI) -> None:
    with backend(server, completions=True) as openai:
        state = text.run(backend=openai, max_tokens=2)
        assert state.text() == "Once upon"
        assert chat.run(backend=openai).text() == "SYSTEM: Be brief.\nUSER: Hi\nASSISTANT:  upon\n"
    assert server.bodies[0] == {"model": "m", "max_tokens": 2, "prompt": "Once"}
    assert server.bodies[1]["stop"] == ["\nUSER:"]
    assert state.get_meta_info("x")["finish_reason"] == {"type": "length", "length": 2}


def test_the_key_of_the_environment(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "from-there"
    monkeypatch.setenv("OPENAI_API_KEY", "from-there")
    with backend(server, dialect="openai") as openai:
        assert chat.run(backend=openai)["x"] == "Hello"
    with backend(server, dialect="openai", api_key="wrong") as openai:
        state = chat.run(backend=openai)
        with pytest.raises(Refused, match="no such key"):
            state["x"]


def test_the_address_is_read_from_the_environment(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    with OpenAI(model="m", dialect="openai") as openai:
        assert chat.run(backend=openai)["x"] == "Hello"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    with backend(server, dialect="openai") as openai:
        assert chat.run(backend=openai)["x"] == "Hello"


def test_several_answers_and_logprobs(server: FakeOpenAI) -> None:
    logprobs = {"content": [{"token": "A", "logprob": -0.5, "top_logprobs": [{"token": "B", "logprob": -1.0}]}]}
    server.answer = lambda _: chat_answer("A", "B", logprobs=logprobs)
    with backend(server, dialect="openai") as openai:
        state = chat.run(backend=openai, n=2, return_logprob=True, top_logprobs_num=1)
        assert state["x"] == ["A", "B"]
    assert {"n": 2, "logprobs": True, "top_logprobs": 1}.items() <= server.bodies[0].items()
    first = state.get_meta_info("x")[0]
    assert first["output_token_logprobs"] == [(-0.5, None, "A")]
    assert first["output_top_logprobs"] == [[(-1.0, None, "B")]]
    assert "completion_tokens" not in first


def test_constraints_in_each_dialect(server: FakeOpenAI) -> None:
    regexes = {"treeline": {"regex": "a+"}, "sglang": {"regex": "a+"}, "vllm": {"structured_outputs": {"regex": "a+"}}}
    for dialect, member in regexes.items():
        with backend(server, dialect=dialect) as openai:
            program(regex="a+").run(backend=openai).text()
            assert member.items() <= server.bodies[-1].items(), dialect
    with backend(server, dialect="openai") as openai:
        program(json_schema={"type": "object"}).run(backend=openai).text()
        schema = {"name": "output", "schema": {"type": "object"}, "strict": True}
        assert server.bodies[-1]["response_format"] == {"type": "json_schema", "json_schema": schema}
        for options in ({"regex": "a+"}, {"dtype": int}, {"top_k": 5}, {"min_tokens": 2}, {"logprob_start_len": 0}):
            sent = len(server.bodies)
            assert isinstance(program(**options).run(backend=openai).error(), Unsupported), options
            assert len(server.bodies) == sent
    with backend(server, dialect="vllm") as openai:
        program(top_k=5, min_p=0.1, min_tokens=2, stop_token_ids=[3], ignore_eos=True).run(backend=openai).text()
        extended = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True}
        assert extended.items() <= server.bodies[-1].items()


def program(**options: Any) -> Any:
    @function
    def one(s: ProgramState) -> None:
        s += user("Hi") + assistant(gen("x", **options))

    return one


def test_the_server_says_what_it_speaks() -> None:
    assert spoken({"data": [{"id": "m", "owned_by": "vllm"}]}, "m") is DIALECTS["vllm"]
    several = {"data": [{"id": "a", "owned_by": "sglang"}, {"id": "m", "owned_by": "treeline"}]}
    assert spoken(several, "m") is DIALECTS["treeline"]
    for other in (None, {}, {"data": None}, {"data": [1, {"id": "m", "owned_by": "somebody"}]}):
        assert spoken(other, "m") is DIALECTS["openai"]
    with pytest.raises(ValueError, match="dialect is one of"):
        OpenAI(model="m", dialect="french")


def test_a_begun_turn_is_continued(server: FakeOpenAI) -> None:
    @function
    def begun(s: ProgramState) -> None:
        s += user("Hi") + assistant("Well: " + gen("x"))

    with backend(server, dialect="vllm") as openai:
        assert begun.run(backend=openai)["x"] == "Hello"
    assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": "Well: "}
    assert server.bodies[0]["continue_final_message"] is True
    assert server.bodies[0]["add_generation_prompt"] is False
    with backend(server, dialect="openai") as openai:
        error = begun.run(backend=openai).error()
        assert isinstance(error, Unsupported)
        assert "a begun turn" in str(error)


def test_texts_without_a_turn_are_refused(server: FakeOpenAI) -> None:
    @function
    def loose(s: ProgramState, before: str, between: str) -> None:
        s += before + user("Hi") + between + assistant(gen("x"))

    with backend(server, dialect="openai") as openai:
        for before, between in (("Read this. ", ""), ("", "Read this. ")):
            assert "would be lost" in str(loose.run(before, between, backend=openai).error())
        assert "in a turn of the assistant" in str(text.run(backend=openai).error())
    assert not server.bodies


def test_images_are_parts(server: FakeOpenAI) -> None:
    @function
    def look(s: ProgramState) -> None:
        s += user(image(PNG) + "What is this?") + assistant(gen("x"))

    with backend(server, dialect="openai") as openai:
        look.run(backend=openai).text()
    picture, question = server.bodies[0]["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert question == {"type": "text", "text": "What is this?"}
    with backend(server, completions=True) as openai:
        assert isinstance(look.run(backend=openai).error(), Unsupported)


def test_streams(server: FakeOpenAI) -> None:
    pieces = [delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo"), delta("stop")]
    server.answer = lambda _: iter([*pieces, usage(7, 2), DONE])
    with backend(server, dialect="openai") as openai:
        prompt = Prompt("USER: Hi\nASSISTANT: ", ({"role": "user", "content": "Hi"},), "assistant")

        async def texts() -> list[str]:
            stream = openai.stream(prompt, Sampling(), Call())
            return [completion.text async for completion in stream]

        assert background.call(texts())[1:4] == ["Hel", "Hello", "Hello"]
        state = chat.run(backend=openai, stream=True)
        assert "".join(state.text_iter("x")) == "Hello"
        assert state.get_meta_info("x")["completion_tokens"] == 2
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("events", "kind", "said"),
    [
        ([delta(content="a"), DONE], Unreachable, "broke off"),
        ([b'data: {"error": {"message": "no memory"}}\n\n'], BackendError, "aborted the request: no memory"),
        ([b'data: {"error": {"message": "busy", "code": 503}}\n\n'], BackendError, "aborted the request: busy"),
        ([b'data: {"error": {"message": "no such token", "code": 400}}\n\n'], Refused, "no such token"),
        ([b'data: {"error": {"message": "no", "type": "BadRequestError"}}\n\n'], Refused, "refused the request: no"),
        ([b"data: [1]\n\n"], BackendError, "not one of OpenAI's API"),
    ],
)
def test_streams_that_fail(server: FakeOpenAI, events: list[bytes], kind: type[BackendError], said: str) -> None:
    server.answer = lambda _: iter(events)
    with backend(server, dialect="openai") as openai:
        error = chat.run(backend=openai, stream=True).error()
    assert type(error) is kind
    assert said in str(error)


@pytest.mark.parametrize("answer", [{}, {"choices": 3}, {"choices": [{"index": 0}]}, [], {"choices": []}])
def test_answers_that_are_none(server: FakeOpenAI, answer: Any) -> None:
    server.answer = lambda _: whole_answer(answer)
    with backend(server, dialect="openai") as openai:
        assert isinstance(chat.run(backend=openai).error(), BackendError)


# ---- select -----------------------------------------------------------------------------------------------------


def ask(*choices: str) -> Any:
    @function
    def asking(s: ProgramState) -> None:
        s += "The" + select("x", list(choices))

    return asking


def test_select_by_echoed_logprobs(server: FakeOpenAI) -> None:
    def echo(body: dict[str, Any]) -> bytes:
        assert (body["echo"], body["max_tokens"]) == (True, 0)
        if isinstance(body["prompt"], str):
            return whole_answer({"choices": [{"index": 0, "text": ""}], "usage": {"prompt_tokens": 3}})
        rows = []
        for index, prompt in enumerate(body["prompt"]):
            tokens = [prompt[0], prompt[1], prompt[2], *prompt[3:]]
            values = [None] + [-float(ord(character) % 7) for character in prompt[1:]]
            rows.append({"index": index, "text": prompt, "logprobs": {"tokens": tokens, "token_logprobs": values}})
        return whole_answer({"choices": list(reversed(rows))})

    server.answer = echo
    with backend(server, completions=True, dialect="vllm") as openai:
        state = ask("b", "a", "ab").run(backend=openai)
        assert state.get_meta_info("x")["scores"] == {"b": 0.0, "a": -6.0, "ab": -3.0}
        assert state["x"] == "b"


def test_a_backend_that_cannot_select_says_why(server: FakeOpenAI) -> None:
    @function
    def choosing(s: ProgramState, method: str | None = None) -> None:
        s += user("a or b?") + assistant(select("x", ["a", "b"], choices_method=method))

    with backend(server, dialect="treeline") as openai:
        assert "completions=True" in str(choosing.run(backend=openai).error())
    with backend(server, dialect="openai", completions=True) as openai:
        assert "cannot select" in str(choosing.run(backend=openai).error())
        error = choosing.run(backend=openai, method="unconditional_likelihood_normalized").error()
        assert isinstance(error, ProgramError)
        assert "token ids" in str(error)
    assert not server.bodies


def test_bodies_are_json(server: FakeOpenAI) -> None:
    with backend(server, dialect="openai") as openai:
        chat.run(backend=openai, stop=["é"]).text()
    assert json.dumps(server.bodies[0])
    assert server.bodies[0]["stop"] == ["é"]
