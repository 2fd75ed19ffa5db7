"""The backends against a real server of ours: all give the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.runtime_server import ServerProcess, running
from treeline_lang import (
    Anthropic,
    OpenAI,
    Refused,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)
from treeline_lang.backends.base import Backend
from treeline_lang.state import ProgramState

pytestmark = [pytest.mark.integration, pytest.mark.deep]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running("models/tiny", "--no-events", "--served-model-name", "tiny") as server:
        yield server


BACKENDS: dict[str, Callable[[str], Backend]] = {
    "runtime": RuntimeEndpoint,
    "chats": lambda url: OpenAI(f"{url}/v1", model="tiny"),
    "completions": lambda url: OpenAI(f"{url}/v1", model="tiny", completions=True, chat_template="chatml"),
    "anthropic": lambda url: Anthropic(url=url, model="tiny"),
}


@function
def capital(s: ProgramState) -> None:
    s += system("Be brief.") + user("What is the capital of France?")
    s += assistant("The capital of" + gen("answer", max_tokens=12, stop="."))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_begun_turn_is_continued(server: ServerProcess, name: str) -> None:
    with BACKENDS[name](server.url) as backend:
        state = capital.run(backend=backend, temperature=0)
        assert state["answer"] == " France is Paris"
        meta = state.get_meta_info("answer")
        assert meta["finish_reason"]["matched"] == "."
        assert meta["prompt_tokens"] > 10
        streamed = capital.run(backend=backend, temperature=0, stream=True)
        assert "".join(streamed.text_iter("answer")) == " France is Paris"
        assert streamed.get_meta_info("answer")["prompt_tokens"] == meta["prompt_tokens"]


@pytest.mark.parametrize("name", ["runtime", "chats", "completions"])
def test_constraints_logprobs_and_several_answers(server: ServerProcess, name: str) -> None:
    @function
    def held(s: ProgramState) -> None:
        s += user("Yes or no?") + assistant(gen("said", regex="(yes|no)", return_logprob=True, max_tokens=8))
        s += user("Again?") + assistant(gen("again", n=2, json_schema={"enum": ["yes", "no"]}, max_tokens=8))

    with BACKENDS[name](server.url) as backend:
        state = held.run(backend=backend, temperature=0)
        assert state["said"] in ("yes", "no")
        assert state.get_meta_info("said")["output_token_logprobs"][0][0] <= 0
        assert state["again"][0] in ('"yes"', '"no"')
        assert len(state["again"]) == 2


def test_completions_select_as_the_runtime_does(server: ServerProcess) -> None:
    @function
    def choose(s: ProgramState, method: str) -> None:
        s += "The capital of France is" + select("city", [" London", " Paris", " Par"], choices_method=method)

    scores = []
    for name in ("runtime", "completions"):
        with BACKENDS[name](server.url) as backend:
            for method in ("token_length_normalized", "greedy_token_selection"):
                state = choose.run(method=method, backend=backend)
                scores.append((state["city"], state.get_meta_info("city")["scores"]))
    assert scores[0][0] == scores[2][0]
    assert scores[0][1] == pytest.approx(scores[2][1], abs=1e-3)
    assert scores[1] == scores[3]


@pytest.mark.parametrize("name", BACKENDS)
def test_speculation_on_a_real_model(server: ServerProcess, name: str) -> None:
    def counting(tokens: int | None) -> ProgramState:
        @function(num_api_spec_tokens=tokens)
        def program(s: ProgramState) -> None:
            s += user("What is the capital of France?")
            s += assistant(gen("subject", stop=" is", max_tokens=8) + " is" + gen("city", stop=".", max_tokens=4) + ".")

        return program.run(backend=backend, temperature=0)

    with BACKENDS[name](server.url) as backend:
        plain, speculated = counting(None), counting(32)
        assert speculated.variables == plain.variables == {"subject": "The capital of France", "city": " Paris"}
        assert speculated.text() == plain.text()
        assert [speculated.get_meta_info(name)["calls"] for name in ("subject", "city")] == [1, 0]


@pytest.mark.parametrize("name", BACKENDS)
def test_refusals_are_typed(server: ServerProcess, name: str) -> None:
    @function
    def much(s: ProgramState) -> None:
        s += user("word " * 9000) + assistant(gen("x"))

    with BACKENDS[name](server.url) as backend:
        assert isinstance(much.run(backend=backend).error(), Refused)
