"""Programs of SGLang's language with only the import changed: its own test programs, and what its examples use.

Its programs are read from the wheel of `make engine-wheels`. What a large model has to know is not asserted, as
models/tiny does not: the programs of `CLEVER` run, and may fail by their last assertions alone.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import treeline_lang as sgl
from support.engine_wheels import frontend_folder, needs_engine_frontend
from support.lang_backend import FakeBackend
from support.runtime_server import ServerProcess, running
from transformers import AutoTokenizer
from treeline_lang import sampling

TINY = Path(__file__).parents[2] / "models" / "tiny"
IMPORTS = {
    "import sglang as sgl": "import treeline_lang as sgl",
    "from sglang.lang.ir import": "from treeline_lang import",
    "from sglang.srt.utils import is_hip": "is_hip = bool",  # of its engine
    "from sglang.srt.utils.hf_transformers_utils import get_tokenizer": "get_tokenizer = AutoTokenizer.from_pretrained",
}
CLEVER = {
    "test_few_shot_qa": "capitals that it was not trained on",
    "test_decode_int": "hours of a day, days of a year",
    "test_decode_json_regex": "a text that ends, or is cut by max_tokens within its quotes",
    "test_decode_json": "the same",
    "test_tool_use": "a product as an expression: Python's own error for what is none",
    "test_react": "which country Linus Torvalds lives in, found within four rounds",
    "test_expert_answer": "an expert on France",
    "test_parallel_encoding": "who is whose father",
    "test_gen_min_new_tokens": "a text that its tokenizer cuts as it was generated",
}
TABLE = {
    "test_image_qa": "images: of models that see them",
    "test_stream_logprobs": "logprobs of a stream's pair are all so far, not those of the piece",
}
PLAIN = ("test_mt_bench", "test_select", "test_parallel_decoding", "test_stream", "test_regex", "test_dtype_gen")
SPECULATIVE = ("test_completion_speculative", "test_chat_completion_speculative")
"""They need OpenAI's API, whose backend has `token_usage`. The first asserts that the model writes the next labels by
itself, which a small one does by chance; tests/lang/test_speculation.py checks what speculation saves."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY, "--no-events", "--max-total-tokens=16384") as server:
        yield server


@pytest.fixture
def endpoint(server: ServerProcess) -> Iterator[sgl.RuntimeEndpoint]:
    with sgl.RuntimeEndpoint(server.url) as backend:
        sgl.global_config.default_backend = backend
        yield backend
    sgl.set_default_backend(None)


def programs() -> dict[str, Callable[..., None]]:
    source = (frontend_folder() / "sglang" / "test" / "test_programs.py").read_text()
    for theirs, ours in IMPORTS.items():
        source = re.sub(re.escape(theirs) + r"\b", ours, source)
    found: dict[str, Any] = {"AutoTokenizer": AutoTokenizer, "__name__": "programs"}
    exec(compile(source, "test_programs.py", "exec"), found)
    return {name: value for name, value in found.items() if name.startswith("test_")}


@needs_engine_frontend
@pytest.mark.integration
@pytest.mark.deep
def test_every_sglang_program_is_run_or_in_the_table() -> None:
    assert set(programs()) == {*PLAIN, *CLEVER, *SPECULATIVE, *TABLE}


@needs_engine_frontend
@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize("name", [*PLAIN, *CLEVER])
def test_an_sglang_program_runs(endpoint: sgl.RuntimeEndpoint, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_NEW_TOKENS", 24)  # a busy machine takes minutes for what a small model rambles
    arguments = {"check_answer": False} if name == "test_select" else {}
    endpoint.endpoint = endpoint  # type: ignore[attr-defined]  # as a Runtime has
    knowledge = (AssertionError, ValueError, SyntaxError, sgl.UnknownVariable) if name in CLEVER else ()
    with contextlib.suppress(*knowledge):
        programs()[name](**arguments)


@needs_engine_frontend
@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize("name", SPECULATIVE)
def test_an_sglang_program_for_openai_runs(server: ServerProcess, name: str) -> None:
    completions = name == "test_completion_speculative"
    with sgl.OpenAI(server.url + "/v1", model="tiny", completions=completions) as backend:
        sgl.set_default_backend(backend)
        try:
            with contextlib.suppress(*[AssertionError] * completions):
                programs()[name]()
        finally:
            sgl.set_default_backend(None)


# ---- what its examples use ------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.deep
def test_a_runtime_serves_until_it_is_shut_down() -> None:
    @sgl.function
    def capital(s: Any, country: str) -> None:
        s += sgl.user("What is the capital of " + country + "?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=16))

    runtime = sgl.Runtime(model_path=str(TINY), max_total_tokens=4096)
    try:
        sgl.set_default_backend(runtime)
        assert "Paris" in capital.run("France", temperature=0)["answer"]
        assert runtime.endpoint.get_model_name() == str(TINY)
    finally:
        sgl.set_default_backend(None)
        runtime.shutdown()
        runtime.shutdown()
    with pytest.raises(sgl.Unreachable):
        runtime.get_model_info()
    with pytest.raises(sgl.Unreachable, match="did not start"):
        sgl.Runtime(model_path="/nowhere")


def test_the_server_of_a_runtime_takes_free_ports_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def ends_at_once(argv: list[str]) -> subprocess.Popen[bytes]:
        started.append(argv)
        return popen([sys.executable, "-c", "raise SystemExit(1)"])

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", ends_at_once)
    with pytest.raises(sgl.Unreachable, match="status 1"):
        sgl.Runtime("tiny", page_size=None, mixed_chunk=False)
    [argv] = started
    flags = dict(itertools.pairwise(argv))
    assert (flags["--metrics-port"], flags["--admin-port"]) == ("0", "0")
    assert not {"--page-size", "--mixed-chunk"} & set(argv)


@pytest.mark.integration
@pytest.mark.deep
def test_a_gen_of_no_tokens_has_the_likeliest_first_tokens(endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def looks(s: Any) -> None:
        s += "The capital of France is"
        s += sgl.gen("top", max_tokens=0, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)

    for stream in (False, True):
        state = looks.run(temperature=0, stream=stream)
        [first] = state.get_meta_info("top")["output_top_logprobs"]
        assert next(text for _, _, text in first) == " Paris"
        assert len(first) == 3
        assert (state["top"], state.text()) == ("", "The capital of France is")


class Last:
    """A choices method of a program's own."""

    requires_unconditional_logprobs = True

    def __call__(self, *, choices: list[str], unconditional_token_logprobs: Any, **told: Any) -> sgl.ChoicesDecision:
        assert len(told["input_token_logprobs"]) == len(unconditional_token_logprobs) == len(choices)
        assert len(told["normalized_prompt_logprobs"]) == len(told["output_token_logprobs"]) == len(choices)
        first = sgl.token_length_normalized(choices=choices, **told)
        return sgl.ChoicesDecision(choices[-1], {"by_length": first.decision})


@sgl.function
def picks(s: Any, method: Any) -> None:
    s += "The capital of France is" + sgl.select("city", [" Paris", " Berlin"], choices_method=method)


@pytest.mark.integration
@pytest.mark.deep
def test_a_program_may_have_a_choices_method_of_its_own(endpoint: sgl.RuntimeEndpoint) -> None:
    state = picks.run(Last())
    meta = state.get_meta_info("city")
    assert (state["city"], meta["by_length"], meta["choices_method"]) == (" Berlin", " Paris", "Last")
    assert meta["scores"] == {" Paris": 0.0, " Berlin": 1.0}
    state = picks.run(lambda **_: sgl.ChoicesDecision("no choice"))
    with pytest.raises(sgl.ProgramError, match="none of the choices"):
        _ = state["city"]


def test_the_default_backend_comes_from_the_configuration() -> None:
    backend = FakeBackend()
    sgl.global_config.verbosity = 2  # type: ignore[attr-defined]
    sgl.global_config.default_backend = backend
    try:
        assert picks.run(None)["city"]
        assert picks.func.__name__ == picks.__name__ == "picks"
    finally:
        sgl.set_default_backend(None)
    assert sgl.global_config.default_backend is None


def test_the_patterns_of_types_have_names() -> None:
    for pattern, text in ((sgl.REGEX_INT, "-12"), (sgl.REGEX_FLOAT, "1.5"), (sgl.REGEX_BOOL, "True")):
        assert re.fullmatch(pattern, text)
    assert re.fullmatch(sgl.REGEX_STR, '"a b"')
