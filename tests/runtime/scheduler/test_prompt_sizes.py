"""The choice of captured prompt steps. Comparing their results with uncaptured ones needs a CUDA device."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime import Engine, SamplingParams
from treeline_runtime.memory import worth_capturing
from treeline_runtime.models.config import ModelConfig, read_config
from treeline_runtime.scheduler.prompt_graphs import sizes_up_to

TINY_MODEL = Path(__file__).parents[3] / "models" / "tiny"


@given(st.integers(0, 10_000))
def test_sizes_reach_the_largest_and_leave_little_empty(largest: int) -> None:
    sizes = sizes_up_to(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes or [0])[-1] == largest
    for smaller, size in zip([0, *sizes], sizes, strict=False):
        assert size - smaller <= max(16, size // 4)
        assert size % 16 == 0 or size == largest


def test_few_sizes_are_captured() -> None:
    assert len(sizes_up_to(512)) == 16
    assert len(sizes_up_to(4096)) == 28


def test_larger_models_capture_shorter_steps() -> None:
    def tokens(hidden: int, inner: int, heads: int, kv_heads: int) -> int:
        config = dataclasses.replace(
            a_config(), hidden_size=hidden, intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=128,
        )  # fmt: skip
        return worth_capturing(config)

    assert tokens(1024, 3072, 16, 8) == 4096  # Qwen3-0.6B
    assert tokens(4096, 14336, 32, 8) == 512  # Llama-8B
    assert tokens(8192, 28672, 64, 8) == 256  # Llama-70B
    assert all(tokens(hidden, 4 * hidden, 16, 8) % 64 == 0 for hidden in range(256, 9000, 256))


def a_config() -> ModelConfig:
    return read_config(TINY_MODEL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_equal_uncaptured_ones() -> None:
    prompts = [[7 + (i * j) % 900 for j in range(1, length)] for i, length in enumerate((2, 17, 40, 130, 300), 3)] * 2
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    answers = []
    for settings in ({}, {"max_graph_tokens": 0}, {"mixed_chunk": True, "chunked_prefill_size": 64}):
        with Engine(TINY_MODEL, device="cuda", dtype="float32", max_total_tokens=16384, **settings) as engine:
            answers.append([output.token_ids for output in engine.generate(prompts, params)])
            answers.append([output.token_ids for output in engine.generate(prompts, params)])  # from the cache
    assert all(answer == answers[0] for answer in answers)
