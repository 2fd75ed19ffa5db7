"""Logits equal those of transformers, for any configuration, any chunks and any order of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runtime_models import IDS, Runner, fed_in_pieces, logits_of, ours, reference, save

transformers = pytest.importorskip("transformers")

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA2 = {"head_dim": 24, "sliding_window": 10, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 3.0}
GEMMA3 = {"head_dim": 24, "sliding_window": 10, "query_pre_attn_scalar": 40, "num_hidden_layers": 3}
GEMMA3 |= {"layer_types": [SLIDING, FULL, SLIDING]}


def longrope(frequencies: int, **more: Any) -> dict[str, Any]:
    short, long = ([1.0 + i * step for i in range(frequencies)] for step in (0.1, 1.5))
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long, **more}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("Llama", {"head_dim": 24}),
    "llama-llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-yarn-mscale": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 0.9,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        },
    ),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-layer-types": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 13}),
    "mistral-wide-heads-long-window": ("Mistral", {"head_dim": 24, "sliding_window": 4096}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-uncapped": (
        "Gemma2",
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2-full": ("Gemma2", GEMMA2 | {"layer_types": [FULL, FULL], "num_key_value_heads": 4}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-linear-rope": (
        "Gemma3",
        GEMMA3
        | {
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-untied-mqa": ("Gemma3", GEMMA3 | {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 11, "num_key_value_heads": 4}),
    "phi4-mini": ("Phi3", {"tie_word_embeddings": True, "rope_parameters": longrope(6, partial_rotary_factor=0.75)}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": longrope(8), "original_max_position_embeddings": 32, "sliding_window": 4096},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-mha-biases": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = reference(*CASES[case])
    model = ours(save(theirs, tmp_path))
    expected = logits_of(theirs)
    np.testing.assert_allclose(Runner(model).feed(IDS), expected, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(fed_in_pieces(model), expected, rtol=1e-4, atol=2e-4)


def test_keys_of_older_configurations_mean_the_same(tmp_path: Path) -> None:
    theirs = reference(*CASES["llama-llama3-rope"])
    path = save(theirs, tmp_path)
    config = json.loads((path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    config["torch_dtype"] = config.pop("dtype")
    new = ours(path)
    (path / "config.json").write_text(json.dumps(config))
    old = ours(path)
    assert old.config == new.config
    assert torch.equal(Runner(old).feed(IDS), Runner(new).feed(IDS))


def test_bfloat16_weights_are_computed_in_float32_on_cpu(tmp_path: Path) -> None:
    theirs = reference("Qwen3", {"head_dim": 16}).to(torch.bfloat16)
    path = save(theirs, tmp_path)
    logits = Runner(ours(path)).feed(IDS)
    upcast = transformers.Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = upcast(torch.tensor([IDS])).logits[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=2e-4)


def test_random_weights_are_repeatable(tmp_path: Path) -> None:
    path = save(reference("Qwen3", {"head_dim": 16}), tmp_path)
    first, second = ours(path, load_format="dummy"), ours(path, load_format="dummy")
    other = ours(path, load_format="dummy", seed=1)
    assert torch.equal(Runner(first).feed(IDS), Runner(second).feed(IDS))
    assert not torch.equal(Runner(first).feed(IDS), Runner(other).feed(IDS))
