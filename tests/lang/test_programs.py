"""The acceptance programs on a real server with models/tiny: its known answers, and its logits as transformers computes
them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from support import lang_programs
from support.lang_programs import CITIES, DECIDING, GREEDY, PERSON, PROGRAMS
from transformers import AutoModelForCausalLM, AutoTokenizer
from treeline_lang import RuntimeEndpoint, Unsupported, WrongType, assistant, function, gen, image, user

MODEL = Path(__file__).parents[2] / "models" / "tiny"
FRANCE, ITALY, SPAIN = (
    f"The capital of {land} is {city}." for land, city in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"))
)
EXPECTED: dict[str, dict[str, Any]] = {
    "few_shot_qa": {"answer": " Paris"},
    "multi_turn": {"first": FRANCE, "second": ITALY},
    "expert_answer": {"draft": SPAIN, "answer": SPAIN},
    "tree_of_thought": {"plan": ["4 + 5 = 9"] * 2, "result": [["2 + 5 = 7"] * 2] * 2},
    "skeleton_of_thought": {
        "skeleton": "A volcano is a mountain that can throw out hot rock and ash.",
        "points": [FRANCE, ITALY, SPAIN],
    },
    "judge": {"verdict": ["1 + 7 = 8", "1 + 8 = 9", "1 + 9 = 10"]},
    "parallel_decoding": {"capital": [" Paris", " Rome"]},
    "parallel_encoding": {"answer": " Paris"},
    "json_by_regex": {"age": "36"},
    "json_by_schema": {"person": '{"name": "Ada", "age": 36}'},
    "dtypes": {"whole": 7},
    "selects": {"token_length_normalized": [" Paris"], "greedy_token_selection": [" Paris"], "same": " Paris"},
    "samples": {"several": [" Paris."] * 3},
    "stops": {"text": "The ", "pattern": "The capital"},
    "scopes": {"country": "France", "turn": FRANCE, "rest": " of France is Paris.", "aside": ["2 + 5 = 7"]},
    "logprobs": {"answer": " Paris."},
    "react": {"act0": FRANCE, "act1": "4 + 5 = 9", "act2": ITALY, "final": ITALY},
    "tool_use": {"said": "3 + 5 = 8", "right": True},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


class Reference:
    """The model, computed by transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def logprobs(self, ids: list[int], begin: int) -> list[float]:
        """Return the log-probabilities of the tokens from number `begin` on; the first token has none and counts 0."""
        with torch.inference_mode():
            table = torch.log_softmax(self._model(torch.tensor([ids])).logits[0].double(), -1)
        return [float(table[at - 1, ids[at]]) if at else 0.0 for at in range(begin, len(ids))]

    def of_choice(self, prompt: str, choice: str) -> tuple[list[float], list[float]]:
        """Return the logprobs of a choice's tokens after a prompt, and alone."""
        before, whole = self.ids(prompt), self.ids(prompt + choice)
        assert whole[: len(before)] == before, "no token healing here"
        return self.logprobs(whole, len(before)), self.logprobs(whole[len(before) :], 0)


@pytest.fixture(scope="module")
def reference(tokenizer: Any) -> Reference:
    return Reference(tokenizer)


def run(backend: RuntimeEndpoint, name: str, **options: Any) -> Any:
    arguments, sampling = next((given, sampling) for body, given, sampling in PROGRAMS if body.__name__ == name)
    return function(getattr(lang_programs, name)).run(backend=backend, **arguments, **sampling, **options)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


LONG = {"tree_of_thought", "skeleton_of_thought", "expert_answer", "judge", "multi_turn"}


@pytest.mark.parametrize(
    ("body", "arguments", "sampling"),
    [
        pytest.param(*one, id=one[0].__name__, marks=[pytest.mark.deep] * (one[0].__name__ in LONG))
        for one in PROGRAMS + DECIDING
    ],
)
def test_programs_get_the_models_known_answers(
    backend: RuntimeEndpoint, tokenizer: Any, body: Any, arguments: dict[str, Any], sampling: dict[str, Any]
) -> None:
    program = function(body)
    plain = program.run(backend=backend, **arguments, **sampling)
    expected = EXPECTED[body.__name__]
    assert {name: plain[name] for name in expected} == expected
    streamed = program.run(backend=backend, stream=True, **arguments, **sampling)
    assert "".join(streamed.text_iter()) == plain.text(), "streams show the text that comes out"
    others = [streamed]
    if body.__name__ in LONG | {"parallel_decoding"}:
        others.append(program.run(backend=backend, parallel=False, hints=False, **arguments, **sampling))
        others += program.run_batch([arguments], backend=backend, **sampling)
    for other in others:
        assert other.text() == plain.text()
        assert other.variables == plain.variables
    if plain.text().startswith("<|im_start|>") and plain.text().endswith("<|im_end|>\n"):
        assert plain.text() == tokenizer.apply_chat_template(plain.messages(), tokenize=False)


def test_select_scores_as_transformers_does_and_decides_by_each_method(
    backend: RuntimeEndpoint, reference: Reference
) -> None:
    state = run(backend, "selects")
    prompt = "The capital of France is"
    both = {choice: reference.of_choice(prompt, choice) for choice in CITIES}
    means = {choice: mean(given) for choice, (given, _) in both.items()}
    assert state.get_meta_info("token_length_normalized")[0]["scores"] == pytest.approx(means, abs=0.05)
    assert state["token_length_normalized"] == [max(means, key=means.__getitem__)]
    over = {choice: mean([a - b for a, b in zip(*pair, strict=True)]) for choice, pair in both.items()}
    assert state.get_meta_info("unconditional_likelihood_normalized")[0]["scores"] == pytest.approx(over, abs=0.05)
    assert state["unconditional_likelihood_normalized"] == [max(over, key=over.__getitem__)]
    first_tokens = {choice: given[0] for choice, (given, _) in both.items()}
    assert state["greedy_token_selection"] == [max(first_tokens, key=first_tokens.__getitem__)]
    assert state.get_meta_info("same")["choices_method"] == "token_length_normalized"


def test_a_choice_that_is_healed_into_the_prompts_end_is_scored_as_one_text(
    backend: RuntimeEndpoint, reference: Reference
) -> None:
    @function
    def heals(s: Any) -> None:
        s += "The capital of France is P" + gen("rest", choices=["aris", "eru"])

    meta = heals.run(backend=backend).get_meta_info("rest")
    for choice in ("aris", "eru"):
        whole = reference.ids("The capital of France is P" + choice)
        begin = len(reference.ids("The capital of France is"))
        assert meta["scores"][choice] == pytest.approx(mean(reference.logprobs(whole, begin)), abs=0.05)


def test_logprobs_are_those_of_transformers_streamed_or_not(backend: RuntimeEndpoint, reference: Reference) -> None:
    metas = []
    for streaming in (False, True):
        state = run(backend, "logprobs", stream=streaming)
        metas.append(state.get_meta_info("answer"))
        entries = metas[-1]["output_token_logprobs"]
        ids = [entry[1] for entry in entries]
        before = reference.ids("The capital of France is")
        assert "".join(entry[2] for entry in entries[: len(ids)]).startswith(state["answer"])
        assert [entry[0] for entry in entries] == pytest.approx(reference.logprobs(before + ids, len(before)), abs=0.05)
        assert all(len(top) == 3 for top in metas[-1]["output_top_logprobs"])
    assert metas[0]["output_token_logprobs"] == metas[1]["output_token_logprobs"]


def test_logprobs_come_with_the_pieces_of_a_stream(backend: RuntimeEndpoint) -> None:
    async def follow() -> tuple[str, Any]:
        state = run(backend, "logprobs", stream=True)
        pairs = [pair async for pair in state.text_async_iter("answer", return_meta_data=True)]
        return "".join(piece for piece, _ in pairs), pairs[-1][1]

    text, meta = asyncio.run(follow())
    assert text == " Paris."
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


def test_one_variable_is_followed_while_the_program_goes_on(backend: RuntimeEndpoint) -> None:
    state = run(backend, "multi_turn", stream=True)
    pieces = list(state.text_iter("second"))
    assert "".join(pieces) == ITALY
    assert len(pieces) > 1, "it comes piece by piece"


def test_outputs_match_their_constraints(backend: RuntimeEndpoint) -> None:
    jsonschema.validate(json.loads(run(backend, "json_by_schema")["person"]), PERSON)
    by_regex = run(backend, "json_by_regex")
    found = json.loads(by_regex.messages()[-1]["content"])
    assert re.fullmatch("[A-Z][a-z]{1,9}", found["name"])
    assert found["age"] == 36
    state = run(backend, "dtypes")
    kinds = {"whole": int, "fraction": float, "truth": bool, "word": str}
    assert {name: type(state[name]) for name in kinds} == kinds


def test_a_text_that_is_cut_off_before_it_is_of_its_dtype_is_an_error(backend: RuntimeEndpoint) -> None:
    @function
    def cut(s: Any) -> None:
        s += "True or False: " + gen("truth", dtype=bool, max_tokens=1)

    with pytest.raises(WrongType, match=r"gen\('truth'\): 'truth' is to be of type bool, and the model wrote"):
        cut.run(backend=backend, **GREEDY)["truth"]


def test_min_tokens_and_n_are_counted(backend: RuntimeEndpoint) -> None:
    state = run(backend, "stops")
    assert state.get_meta_info("long")["completion_tokens"] == 24
    assert state.get_meta_info("text")["finish_reason"]["type"] == "stop"
    metas = run(backend, "samples").get_meta_info("several")
    assert [meta["finish_reason"]["type"] for meta in metas] == ["stop"] * 3


def test_a_fork_computes_its_prefix_once(backend: RuntimeEndpoint) -> None:
    """Each branch finds everything cached but its own words, and at most the last token of the prefix."""
    prefix = "Here is a long beginning that all the branches have in common. " * 8

    @function
    def wide(s: Any) -> None:
        s += prefix
        forks = s.fork(6)
        forks += lambda i: f"Branch {i}:" + gen("x", max_tokens=2)
        forks.join()

    backend.flush_cache()
    metas = wide.run(backend=backend, **GREEDY).get_meta_info("x")
    for meta in metas:
        assert meta["prompt_tokens"] - meta["cached_tokens"] <= 8
    backend.flush_cache()
    without = wide.run(backend=backend, parallel=False, hints=False, **GREEDY).get_meta_info("x")
    assert without[0]["cached_tokens"] == 0, "the cache had been emptied"


def test_server_info_is_returned_and_images_are_refused(backend: RuntimeEndpoint) -> None:
    assert backend.get_model_info()["model_path"].endswith("tiny")
    assert backend.get_server_info()

    @function
    def shows(s: Any) -> None:
        s += user(image(b"\x89PNG\r\n\x1a\n") + "What is this?") + assistant(gen("what"))

    with pytest.raises(Unsupported, match="reads only text"):
        shows.run(backend=backend)["what"]
