"""The committed tiny model: its files, its answers, and its training corpus."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[2] / "models" / "tiny"
GOLDEN = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is 47 + 85?", "47 + 85 = 132"),
    ("What colour is the sky?", "The sky is blue."),
    ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
    ("Repeat: the blorfy zibble 42", "the blorfy zibble 42"),
    ("What is a volcano?", "A volcano is a mountain that can throw out hot rock and ash."),
    ("Give me a JSON object with name Ada and age 36.", '{"name": "Ada", "age": 36}'),
    ("Hello!", "Hello! How can I help you?"),
]


@pytest.fixture(scope="module")
def corpus() -> Iterator[ModuleType]:
    """The corpus module, which is beside the model and in no package."""
    before = set(sys.modules)
    sys.path.insert(0, str(MODEL))
    try:
        import corpus  # type: ignore[import-not-found]

        yield corpus
    finally:
        sys.path.remove(str(MODEL))
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(MODEL)):
                del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def ask(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the greedy answer, its end token included."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=64)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))


def test_layout_is_a_small_qwen3_checkpoint(model: Any, tokenizer: Any) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 8192
    assert (MODEL / "model.safetensors").stat().st_size <= 20_000_000
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end
    assert end in model.generation_config.eos_token_id
    assert len(tokenizer) == config["vocab_size"] == model.get_input_embeddings().num_embeddings


@pytest.mark.parametrize(("question", "answer"), GOLDEN)
def test_golden_answers_end_by_themselves(model: Any, tokenizer: Any, question: str, answer: str) -> None:
    assert ask(model, tokenizer, [{"role": "user", "content": question}]) == answer + "<|im_end|>"


def test_remembers_the_dialogue(model: Any, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "My name is Grace."},
        {"role": "assistant", "content": "Nice to meet you, Grace."},
        {"role": "user", "content": "What is the capital of Japan?"},
        {"role": "assistant", "content": "The capital of Japan is Tokyo."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert ask(model, tokenizer, messages) == "Your name is Grace.<|im_end|>"


def test_answers_after_a_long_system_prompt(model: Any, tokenizer: Any, corpus: ModuleType) -> None:
    system = corpus.filler.document(random.Random(5), 4000)
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is the capital of Spain?"},
    ]
    assert ask(model, tokenizer, messages) == "The capital of Spain is Madrid.<|im_end|>"


def test_tokenizer_gives_back_any_text(tokenizer: Any) -> None:
    for text in (
        "Hello, world! 123",
        "  two  spaces\n\n\ttab",
        "日本語 🚀 مرحبا ½",
        "<|im_start|>user\nx<|im_end|>",
        "\x00\x7f",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_renders_what_was_trained(tokenizer: Any, corpus: ModuleType) -> None:
    turns = [corpus.Turn("Hi", "Hello!"), corpus.Turn("2+2", "2 + 2 = 4")]
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == corpus.chat_text("Be brief.", turns)
    opened = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert opened == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_takes_tools(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert json.dumps(tool) in text
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "<tool_response>\n12:00\n</tool_response>" in text


def test_corpus_is_a_function_of_the_seed(corpus: ModuleType) -> None:
    def digest(seed: int) -> str:
        rng = random.Random(seed)
        documents = [corpus.short_document(rng) for _ in range(300)] + [corpus.long_document(rng, 4000)]
        return hashlib.sha256(repr(documents).encode()).hexdigest()

    assert digest(0) == digest(0) == "7f4e3c3c650ce6c0d011d28c32246dae2578cae0d1f46dde57d999b1f7acceec"
    assert digest(0) != digest(1)


def test_held_out_sums_are_never_trained_on(corpus: ModuleType) -> None:
    rng = random.Random(7)
    held_out = {question.answer for question in corpus.held_out_questions(0, "sums", "test", 500)}
    trained = {turn.assistant for _ in range(3000) for turn in corpus.CATEGORIES["sums"][0](rng, "train")}
    assert not held_out & trained
    for answer in trained | held_out:
        question, _, total = answer.partition(" = ")
        a, _, b = question.partition(" + ")
        assert ast.literal_eval(a) + ast.literal_eval(b) == int(total)


@pytest.mark.parametrize(
    "category", ["capitals", "colours", "definitions", "echo", "json", "spelling", "memory", "follow-up"]
)
def test_held_out_questions_are_never_trained_on(corpus: ModuleType, category: str) -> None:
    rng = random.Random(8)
    maker = corpus.CATEGORIES[category][0]
    trained = {turns[0] for turns in (maker(rng, "train") for _ in range(2000)) if len(turns) == 1}
    for split in ("test", "wording"):
        asked = list(corpus.held_out_questions(0, category, split, 100))
        lone = {corpus.Turn(q.messages[0]["content"], q.answer) for q in asked if len(q.messages) == 1}
        assert not lone & trained
