"""Programs on an engine in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runtime_server import make_checkpoint
from treeline_lang import (
    EngineBackend,
    Refused,
    TemplateError,
    assistant,
    function,
    gen,
    select,
    system,
    unconditional_likelihood_normalized,
    user,
)
from treeline_lang.backends.base import Call
from treeline_lang.sampling import Sampling
from treeline_lang.state import ProgramState
from treeline_lang.transcript import Prompt
from treeline_runtime import Engine
from treeline_runtime.models import ModelError
from treeline_wire.chat import ChatTemplate, TemplateBusyError
from treeline_wire.tokenizer import TokenizerBundle

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model="models/tiny", max_total_tokens=8192, threads=1) as engine:
        yield engine


@function
def capital(s: ProgramState) -> None:
    s += system("Be brief.") + user("What is the capital of France?")
    s += assistant(gen("answer", max_tokens=12))


def test_a_chat_is_written_by_the_models_template(engine: Engine) -> None:
    backend = EngineBackend(engine)
    state = capital.run(backend=backend, temperature=0)
    assert state["answer"] == "The capital of France is Paris."
    assert state.text().startswith(engine.render(CHAT))
    first, again = (one.get_meta_info("answer") for one in (state, capital.run(backend=backend, temperature=0)))
    assert first["finish_reason"]["type"] == "stop"
    assert first["prompt_tokens"] == len(engine.encode(engine.render(CHAT)))
    assert again["cached_tokens"] > 0


def test_render(engine: Engine) -> None:
    bundle = TokenizerBundle.from_dir("models/tiny")
    template = ChatTemplate.from_bundle(bundle)
    assert template is not None
    for opened in (True, False):
        assert engine.render(CHAT, add_generation_prompt=opened) == template.render(CHAT, add_generation_prompt=opened)

    async def in_a_notebook() -> str:
        return engine.render(CHAT)

    assert asyncio.run(in_a_notebook()) == template.render(CHAT)


def test_streams_several_answers_and_logprobs(engine: Engine) -> None:
    backend = EngineBackend(engine)
    state = capital.run(backend=backend, temperature=0, stream=True)
    assert "".join(state.text_iter("answer")) == "The capital of France is Paris."
    state = capital.run(
        backend=backend, n=3, temperature=0, return_logprob=True, return_text_in_logprobs=True, top_logprobs_num=2
    )
    assert state["answer"] == ["The capital of France is Paris."] * 3
    for meta in state.get_meta_info("answer"):
        told = meta["output_token_logprobs"]
        assert "".join(text for _, _, text in told).startswith("The capital of France is Paris.")
        assert [top[0][1] for top in meta["output_top_logprobs"]] == [id for _, id, _ in told]
    state = capital.run(backend=backend, temperature=0, stop_regex="Fr.nce")
    assert state["answer"] == "The capital of France"


def test_constraints_and_stops(engine: Engine) -> None:
    @function
    def constrained(s: ProgramState) -> None:
        s += user("How many?") + assistant(gen("count", dtype=int, max_tokens=8) + "." + gen("word", regex="(yes|no)!"))
        s += user("And?") + assistant(gen("cut", stop=" capital") + gen("json", json_schema={"enum": ["a", "b"]}))

    state = constrained.run(backend=EngineBackend(engine), temperature=0)
    assert isinstance(state["count"], int)
    assert state["word"] in ("yes!", "no!")
    assert state["json"] in ('"a"', '"b"')
    assert "capital" not in state["cut"]


def test_select_is_the_likeliest(engine: Engine) -> None:
    @function
    def choose(s: ProgramState, method: str | None = None) -> None:
        s += user("What is the capital of France?")
        s += assistant(
            "The capital of France is" + select("city", [" London", " Paris", " Rome"], choices_method=method)
        )

    for method in (None, "greedy_token_selection", unconditional_likelihood_normalized.name):
        state = choose.run(backend=EngineBackend(engine), method=method)
        assert state["city"] == " Paris", method
    assert [entry[2] for entry in state.get_meta_info("city")["input_token_logprobs"][1]] == [" Paris"]


def test_forks_find_the_prefix_that_was_sent_ahead(engine: Engine) -> None:
    backend = EngineBackend(engine)
    backend.flush_cache()

    @function
    def forked(s: ProgramState) -> None:
        s += user("Tell me of trees. " * 40)
        branches = s.fork(3)
        branches += assistant(gen("x", max_tokens=1))
        branches.join()

    metas = forked.run(backend=backend).get_meta_info("x")
    assert all(meta["cached_tokens"] >= 0.9 * meta["prompt_tokens"] for meta in metas)


async def test_within_a_running_loop(engine: Engine) -> None:
    """In a notebook, too, the body waits in its own thread while the loop goes on."""
    state = await asyncio.to_thread(capital.run, backend=EngineBackend(engine), temperature=0)
    pieces = [piece async for piece in state.text_async_iter("answer")]
    assert "".join(pieces) == "The capital of France is Paris."
    assert capital.run(backend=EngineBackend(engine), temperature=0)["answer"] == "The capital of France is Paris."


async def test_refusals_are_typed(engine: Engine) -> None:
    backend = EngineBackend(engine)
    with pytest.raises(Refused, match="the engine"):
        await backend.generate(Prompt("word " * 9000), Sampling(), Call())
    with pytest.raises(Refused):
        async for _ in backend.stream(Prompt("word " * 9000), Sampling(), Call()):
            pass
    with pytest.raises(ValueError, match="chat_template is one of"):
        EngineBackend(engine, chat_template="no such")


async def test_a_template_that_a_process_renders_ends_with_its_engine(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    long = "{# " + "-" * (32 << 10) + " #}"  # not rendered here
    template = long + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    known = ChatTemplate.from_bundle(TokenizerBundle.from_dir(folder))
    assert known is not None
    assert known.not_inline
    with Engine(model=folder, max_total_tokens=512, threads=1) as engine:
        assert engine.render(CHAT[1:]).startswith("<|im_start|>user\nWhat is")
    with pytest.raises(TemplateBusyError):
        engine.render(CHAT)


def test_a_model_without_a_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "plain")
    (folder / "tokenizer_config.json").write_text("{}")
    with Engine(model=folder, max_total_tokens=512, threads=1) as engine:
        with pytest.raises(ModelError, match="no chat template"):
            engine.render(CHAT)
        error = capital.run(backend=EngineBackend(engine)).error()
        assert isinstance(error, TemplateError)
        assert "give EngineBackend a chat_template" in str(error)
        named = capital.run(backend=EngineBackend(engine, chat_template="plain"), max_tokens=2)
        assert named.text().startswith("SYSTEM: Be brief.\n")
