"""The engine in-process: lists, streams, early ends, errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runtime_engine import VOCAB, prompt, write_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from treeline_runtime import Engine, GenerationError, SamplingParams
from treeline_runtime.config import ConfigError
from treeline_runtime.messages import FinishReason
from treeline_runtime.models import ModelError
from treeline_wire.chat import ChatTemplate
from treeline_wire.tokenizer import TokenizerBundle

GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "page_size": 4, "max_total_tokens": 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dummy weights, and a tokenizer with one token for each character."""
    path = write_config(tmp_path_factory.mktemp("model"))
    vocab = {chr(32 + i): i for i in range(VOCAB - 1)} | {"<end>": VOCAB - 1}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_one_prompt_one_output(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        out = engine.generate("Hello world", GREEDY)
        assert len(out.token_ids) == 10
        assert out.text == "".join(chr(32 + i) for i in out.token_ids)
        assert out.finish == FinishReason("length")
        assert (out.prompt_tokens, out.cached_tokens) == (11, 0)
        again = engine.generate(engine.encode("Hello world"), GREEDY)
        assert (again.text, again.cached_tokens) == (out.text, 8)


def test_a_list_of_texts_and_ids_in_order(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        prompts: list[str | list[int]] = ["first", prompt(1, 9), "third one"]
        outs = engine.generate(prompts, GREEDY)
        assert [o.prompt_tokens for o in outs] == [5, 9, 9]
        for p, out in zip(prompts, outs, strict=True):
            assert engine.generate(p, GREEDY).token_ids == out.token_ids
        lengths = [SamplingParams(max_new_tokens=n) for n in (1, 2, 3)]
        assert [len(o.token_ids) for o in engine.generate(prompts, lengths)] == [1, 2, 3]
        assert engine.generate([], GREEDY) == []
        with pytest.raises(ValueError, match="3 prompts, but 2"):
            engine.generate(prompts, lengths[:2])
        with pytest.raises(ValueError, match="one prompt takes one"):
            engine.generate("one", lengths)  # type: ignore[call-overload]
        engine.scheduler.check_integrity()


def test_leaving_a_stream_early_ends_the_request(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        stream = engine.stream("Hello", SamplingParams(max_new_tokens=400))
        next(stream)
        assert engine.scheduler.load().pages_used > 0
        stream.close()
        assert engine.scheduler.is_idle
        assert engine.scheduler.load().pages_used == 0


def test_a_stop_string_ends_the_text(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        whole = engine.generate("Hello", GREEDY).text
        stop = whole[4:6]
        cut = whole.index(stop)
        for trim in (True, False):
            out = engine.generate(
                "Hello",
                SamplingParams(max_new_tokens=10, temperature=0.0, stop=(stop,), no_stop_trim=not trim),
            )
            assert out.text == whole[: cut if trim else cut + 2]
            assert out.finish == FinishReason("stop", matched=stop)
        streamed = "".join(text for text, _ in engine.stream("Hello", SamplingParams(temperature=0.0, stop=(stop,))))
        assert streamed == whole[:cut]
        assert engine.scheduler.is_idle


def test_logprobs(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        out = engine.generate("Hello", GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
        assert [token for _, token in out.output_token_logprobs] == out.token_ids
        assert [token for _, token in out.input_token_logprobs] == engine.encode("Hello")
        assert [len(top) for top in out.output_top_logprobs] == [2] * 10
        assert out.input_top_logprobs[0] is None


def test_a_refused_request_is_an_exception_and_the_engine_goes_on(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        with pytest.raises(GenerationError, match="600 tokens") as caught:
            engine.generate([prompt(1, 10), [1] * 600], GREEDY)
        assert caught.value.finish.status == 400
        assert engine.scheduler.is_idle, "the other request was ended"
        with pytest.raises(GenerationError, match="temperature"):
            list(engine.stream("x", SamplingParams(temperature=-1.0)))
        assert len(engine.generate("fine", GREEDY).token_ids) == 10


def test_sampling_parameters_may_be_a_mapping_and_are_checked(model: Path) -> None:
    with Engine(model=model, **SETTINGS) as engine:
        greedy = {"max_new_tokens": 10, "temperature": 0, "stop": ["~~~"], "logit_bias": {3: 1.0}}
        same = SamplingParams(max_new_tokens=10, temperature=0.0, stop=("~~~",), logit_bias={3: 1.0})
        assert engine.generate("Hello", greedy).text == engine.generate("Hello", same).text
        assert [len(out.token_ids) for out in engine.generate(["a", "b"], [{"max_new_tokens": 1}, GREEDY])] == [
            1,
            10,
        ]
        assert "".join(text for text, _ in engine.stream("Hello", greedy)) == engine.generate("Hello", greedy).text
        wrong: list[tuple[Any, str]] = [
            ({"max_tokens": 5}, "there is no 'max_tokens'"),
            ({"temperature": "hot"}, r"Expected `float`, got `str` - at `\$.temperature`"),
            (SamplingParams(stop="end"), r"Expected `array`, got `str` - at `\$.stop`"),  # type: ignore[arg-type]
            (5, "expected SamplingParams or a mapping, got int"),
        ]
        for params, problem in wrong:
            with pytest.raises(TypeError, match=problem):
                engine.generate("Hello", params)
        assert engine.scheduler.is_idle


def test_texts_are_neither_truncated_nor_padded(model: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(pad_id=3)
    tokenizer.save(str(path / "tokenizer.json"))
    with Engine(model=path, **SETTINGS) as engine:
        assert len(engine.encode("Hello world")) == 11
        assert [out.prompt_tokens for out in engine.generate(["Hello world", "a"], GREEDY)] == [11, 1]
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read"):
        Engine(model=path, **SETTINGS)


def test_without_a_tokenizer_prompts_are_ids(tmp_path: Path) -> None:
    with Engine(model=write_config(tmp_path), **SETTINGS) as engine:
        out = engine.generate([1, 2, 3], GREEDY)
        assert len(out.token_ids) == 10
        assert out.text == ""
        assert len(list(engine.stream([1, 2, 3], GREEDY))) == 10
        with pytest.raises(ModelError, match=r"no tokenizer.json: give prompts as token ids"):
            engine.generate("text")
        with pytest.raises(ModelError, match="stop strings need one"):
            engine.generate([1], SamplingParams(stop=("x",)))


def test_unknown_settings_are_refused(model: Path) -> None:
    with pytest.raises(TypeError, match="page_sise"):
        Engine(model=model, page_sise=4)
    with pytest.raises(ConfigError, match="attention backend"):
        Engine(model=model, attention_backend="nope", **SETTINGS)


def test_a_start_that_fails_gives_its_folder_of_pages_back(model: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"host_cache": 1 << 20, "disk_cache": str(tmp_path / "pages")}
    with pytest.raises(ModelError, match="--lora-modules bad="):
        Engine(model=model, lora_modules=(f"bad={tmp_path}",), **settings)
    with Engine(model=model, **settings):
        pass


def test_messages_tokens_and_settings_do_not_load_torch() -> None:
    code = (
        "import sys, treeline_runtime.messages, treeline_runtime.tokens, treeline_runtime.config, treeline_runtime;"
        "from treeline_runtime import SamplingParams;"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert result.stdout.strip() == "[]"


TINY_MODEL = Path(__file__).parents[3] / "models" / "tiny"


def test_the_tiny_model_answers_alike_cold_warm_and_in_a_batch() -> None:
    greedy = SamplingParams(max_new_tokens=24, temperature=0.0)
    template = ChatTemplate.from_bundle(TokenizerBundle.from_dir(TINY_MODEL), inline_seconds=60.0)
    assert template is not None
    chat = template.render([{"role": "user", "content": "What is the capital of France?"}])
    with Engine(model=TINY_MODEL, max_total_tokens=8192) as engine:
        answer = engine.generate(chat, greedy)
        assert "Paris" in answer.text
        assert answer.finish is not None
        assert answer.finish.type == "stop"
        ids = engine.encode("Hello, how are you? " * 20)
        endless = msgspec.structs.replace(greedy, ignore_eos=True)
        cold = engine.generate(ids, endless)
        warm = engine.generate(ids, endless)
        assert warm.cached_tokens > 0
        assert warm.token_ids == cold.token_ids
        assert all(out.token_ids == cold.token_ids for out in engine.generate([ids] * 32, endless))
