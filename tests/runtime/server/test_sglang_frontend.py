"""SGLang's own frontend language runs its programs on our server: models/tiny knows the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
from support.engine_wheels import frontend, needs_engine_frontend
from support.runtime_server import ServerProcess, running

TINY = Path(__file__).parents[3] / "models" / "tiny"
pytestmark = [needs_engine_frontend, pytest.mark.integration, pytest.mark.deep]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY, "--no-events", "--max-total-tokens=8192") as server:
        yield server


@pytest.fixture(scope="module")
def sgl(server: ServerProcess) -> Iterator[ModuleType]:
    with frontend() as sgl:
        sgl.set_default_backend(sgl.RuntimeEndpoint(server.url, chat_template_name="chatml"))
        yield sgl


def ask(sgl: ModuleType) -> Any:
    """A program: one question, one answer."""

    @sgl.function
    def program(s: Any, question: str) -> None:
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    return program


def test_roles_and_gen_give_the_chats_answer(sgl: ModuleType, http: httpx.Client) -> None:
    state = ask(sgl).run(question="What is the capital of France?")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0}).json()
    assert "Paris" in state["answer"]
    assert state["answer"] == chat["choices"][0]["message"]["content"]
    assert state.get_meta_info("answer")["finish_reason"]["type"] == "stop"
    assert [message["role"] for message in state.messages()] == ["user", "assistant"]


def test_a_system_prompt_and_several_turns_are_used(sgl: ModuleType) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("You are a helpful assistant. The code word is lantern.")
        with s.user():
            s += "What is the code word?"
        with s.assistant():
            s += sgl.gen("word", max_tokens=24, temperature=0)
        s += sgl.user("What is 17 + 25?")
        s += sgl.assistant(sgl.gen("sum", max_tokens=24, temperature=0))

    state = program.run()
    assert "lantern" in state["word"]
    assert "42" in state["sum"]


def test_a_stream_equals_the_whole_answer(sgl: ModuleType) -> None:
    program = ask(sgl)
    whole = program.run(question="Count from 1 to 5.")["answer"]
    streamed = program.run(question="Count from 1 to 5.", stream=True)
    pieces = list(streamed.text_iter("answer"))
    assert "".join(pieces) == whole
    assert "1, 2, 3, 4, 5" in whole
    assert streamed.error() is None


async def test_a_stream_has_logprobs_of_what_it_said(sgl: ModuleType) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "The capital of France is" + sgl.gen(
            "city",
            max_tokens=2,
            temperature=0,
            return_logprob=True,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
        )

    state = program.run(stream=True)

    heard = [(text, meta) async for text, meta in state.text_async_iter("city", return_meta_data=True)]
    assert "".join(text for text, _ in heard) == state["city"] == " Paris."
    meta = state.get_meta_info("city")
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == state["city"]
    assert all(
        top[0] == one for one, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    )
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []


def test_children_of_a_fork_begin_with_its_text_and_are_joined(sgl: ModuleType) -> None:
    questions = [f"What is the capital of {country}?" for country in ("France", "Italy", "Japan")]

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("You answer in a few words. " * 8)
        group = s.fork(3)
        group += lambda index: sgl.user(questions[index])
        group += sgl.assistant(sgl.gen("capital", max_tokens=24, temperature=0))
        group.join()

    state = program.run()
    for answer, city in zip(state["capital"], ("Paris", "Rome", "Tokyo"), strict=True):
        assert city in answer


def test_texts_of_children_are_appended(sgl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining keys and values instead is an endpoint that no server has."""

    @sgl.function
    def program(s: Any) -> None:
        s += "Numbers:"
        group = s.fork(2)
        group += [" one", " two"]
        group.join("concate_and_append")

    monkeypatch.setattr(sgl.global_config, "enable_parallel_encoding", False)
    assert program.run().text() == "Numbers: one two"


def test_a_batch_answers_each_and_its_common_text_is_cached_before(sgl: ModuleType) -> None:
    @sgl.function
    def program(s: Any, a: int, b: int) -> None:
        s += sgl.system("You are a calculator, and you answer every question in one short sentence, always.")
        s += sgl.user("What is " + a + " + " + b + "?")
        s += sgl.assistant(sgl.gen("sum", max_tokens=24, temperature=0))

    states = program.run_batch([{"a": str(n), "b": str(n + 10)} for n in range(20, 28)], progress_bar=False)
    for n, state in zip(range(20, 28), states, strict=True):
        assert str(2 * n + 10) in state["sum"]
        assert state.get_meta_info("sum")["cached_tokens"] >= 16


@pytest.mark.parametrize(
    ("prompt", "choices", "right"),
    [
        ("The capital of France is", [" Tokyo.", " Paris.", " the city of Rome."], " Paris."),
        ("17 + 25 =", [" 41", " 42", " 142"], None),
        ("The colours red and", ["", " blue", "roid"], None),  # the first changes nothing, the last a token before it
    ],
)
@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_select_chooses_by_our_logprobs(
    sgl: ModuleType, http: httpx.Client, method: str, prompt: str, choices: list[str], right: str | None
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += prompt
        s += sgl.select("choice", choices=choices, choices_method=getattr(sgl, method))

    state = program.run()
    assert state.error() is None
    start = max(len(tokens(http, prompt)) - 2, 0)
    rows = [scores(http, prompt + choice, start) for choice in choices]
    found = state.get_meta_info("choice")["input_token_logprobs"]
    assert [[(id, text) for _, id, text in one] for one in found] == [
        [(id, text) for _, id, text in row] for row in rows
    ]
    for one, row in zip(found, rows, strict=True):
        assert [value for value, _, _ in one] == pytest.approx([value for value, _, _ in row], abs=1e-3)
    assert state["choice"] == choices[chosen(http, method, rows)]
    # the greedy method compares the prompt's tokens first, which are equal but for rounding
    assert right is None or method == "greedy_token_selection" or state["choice"] == right


def tokens(http: httpx.Client, text: str) -> list[int]:
    return list(http.post("/tokenize", json={"prompt": text}).json()["tokens"])


def scores(http: httpx.Client, prompt: str | list[int], start: int) -> list[Any]:
    """Return (logprob, id, text) of its tokens from `start` on."""
    body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": {"max_new_tokens": 0}}
    body |= {"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": start}
    return list(http.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"])


def chosen(http: httpx.Client, method: str, rows: list[list[Any]]) -> int:
    """Apply the rules of the three methods, written independently."""
    values = [np.array([value for value, _, _ in row]) for row in rows]
    if method == "token_length_normalized":
        return int(np.argmax([one.mean() for one in values]))
    if method == "greedy_token_selection":
        longest = max(map(len, values))
        padded = np.array([[*one, *[one.mean()] * (longest - len(one))] for one in values])
        left = list(range(len(values)))
        for column in padded.T:
            left = [at for at in left if column[at] == max(column[left])]
        return left[0]
    alone = [scores(http, [id for _, id, _ in row], 0) for row in rows]
    without = [np.array([value or 0.0 for value, _, _ in one]) for one in alone]
    return int(np.argmax([(one - other).mean() for one, other in zip(values, without, strict=True)]))


def test_gen_with_choices_selects(sgl: ModuleType) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "The capital of Japan is" + sgl.gen("city", choices=[" Paris.", " Tokyo."])

    state = program.run()
    assert state["city"] == " Tokyo."
    assert state.text() == "The capital of Japan is Tokyo."


def test_output_keeps_to_a_regex_and_to_a_type(sgl: ModuleType) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("What is 17 + 25?")
        s += sgl.assistant_begin()
        group = s.fork(5)
        group[0] += sgl.gen("regex", max_tokens=16, temperature=0, regex=r"(4[0-9]|blue)")
        group[1] += sgl.gen_int("int", max_tokens=16, temperature=0)
        group[2] += sgl.gen("bool", max_tokens=16, temperature=0, dtype=bool)
        group[3] += sgl.gen("float", max_tokens=16, temperature=0, dtype=float)
        schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}, "required": ["sum"]}
        schema["additionalProperties"] = False
        group[4] += sgl.gen("json", max_tokens=48, temperature=0, json_schema=json.dumps(schema))
        group.join()

    state = program.run()
    assert re.fullmatch(r"4[0-9]|blue", state["regex"][0])
    assert re.fullmatch(r"[-+]?[0-9]+", state["int"][0].strip())
    assert state["bool"][0] in ("True", "False")
    float(state["float"][0])
    assert set(json.loads(state["json"][0])) == {"sum"}


def test_logprobs_of_the_prompt_start_where_requested(sgl: ModuleType, http: httpx.Client) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "The capital of France is" + sgl.gen(
            "city", max_tokens=4, temperature=0, return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True
        )

    meta = program.run().get_meta_info("city")
    assert meta["input_token_logprobs"][0][0] is None
    assert [id for _, id, _ in meta["input_token_logprobs"]] == tokens(http, "The capital of France is")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


def test_a_refusal_of_the_server_is_an_error_of_the_program(sgl: ModuleType) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=8, temperature=-1.0)

    with pytest.warns(UserWarning, match="temperature"):
        error = program.run().error()
    assert "temperature" in str(error)


def test_the_backend_knows_the_model_and_may_not_flush_the_cache(
    sgl: ModuleType, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/flush_cache` is administration: it has a listener of its own."""
    backend = sgl.RuntimeEndpoint(server.url)
    assert backend.get_model_name() == str(TINY)
    assert sgl.get_server_info(backend)["served_model_name"] == "tiny"
    with pytest.raises(RuntimeError):
        sgl.flush_cache(backend)
    monkeypatch.setattr(backend, "base_url", server.admin_url)
    sgl.flush_cache(backend)
