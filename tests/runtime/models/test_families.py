"""Families differ in their config.json: published ones are read, missing keys get defaults, unsupported ones are
refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runtime_engine import Harness
from support.runtime_models import IDS, SIZES, Runner, edit, ours, reference, save, theirs_of
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.config import parse_config
from treeline_runtime.models.families import FAMILIES
from treeline_runtime.models.settings import READ
from treeline_runtime.ops.torch_ops import TorchOps

transformers = pytest.importorskip("transformers")

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "num_hidden_layers": 3, "sliding_window": 10}
SHORT, LONG = ([1.0 + i * step for i in range(8)] for step in (0.1, 1.5))
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}


OLD = {"rope_parameters": ..., "layer_types": ..., "torch_dtype": "bfloat16", "dtype": ..., "use_cache": True}
PHI = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False, "sliding_window": 262144, "auto_map": {"a": "b"}}
PHI |= {"original_max_position_embeddings": 32, "rope_theta": 1e4}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Mistral-7B-v0.1": ("Mistral", {}, {"rope_theta": 10000.0, "sliding_window": 12}),
    "Mistral-Nemo": ("Mistral", {"head_dim": 24}, {"rope_theta": 1000000.0, "sliding_window": None}),
    "gemma-2-9b": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0},
        {
            "cache_implementation": "hybrid",
            "hidden_act": "gelu_pytorch_tanh",
            "rope_theta": 1e4,
            "sliding_window_size": 10,
        },
    ),
    "gemma-3-1b-it": (
        "Gemma3",
        GEMMA,
        {"rope_theta": 9000.0, "rope_local_base_freq": 300, "rope_scaling": None, "sliding_window_pattern": 2},
    ),
    "gemma-3-12b, its text": (
        "Gemma3",
        GEMMA,
        {"rope_theta": 9000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 3},
    ),
    "Phi-3-mini-128k": (
        "Phi3",
        {},
        PHI | {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
    ),
    "Phi-4": ("Phi3", {}, PHI | {"rope_scaling": None, "sliding_window": None, "rope_theta": 250000}),
    "Phi-4-mini": (
        "Phi3",
        {"tie_word_embeddings": True},
        PHI
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
        | {"partial_rotary_factor": 0.75}
        | {"rope_scaling": {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]}},
    ),
    "OLMo-2-7B": ("Olmo2", {"num_key_value_heads": 4}, {"rope_scaling": None, "rope_theta": 500000}),
}
"""Name → family, settings of small weights, and keys as the checkpoint's config.json has them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_the_same_as_in_transformers(name: str, tmp_path: Path) -> None:
    family, settings, keys = PUBLISHED[name]
    path = edit(save(reference(family, settings), tmp_path), **(OLD | keys))
    expected = theirs_of(path)
    np.testing.assert_allclose(Runner(ours(path)).feed(IDS), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Gemma3", "Phi3", "Olmo2"])
def test_missing_keys_mean_the_same_as_in_transformers(family: str, tmp_path: Path) -> None:
    architecture = f"{family}ForCausalLM"
    config = SIZES | {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    config |= {"hidden_size": 32, "num_attention_heads": 16, "num_hidden_layers": 7, "rope_theta": 500.0}
    config["max_position_embeddings"] = 8192
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, expected = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.head_dim == (getattr(expected, "head_dim", None) or 2)
    assert found.rms_norm_eps == expected.rms_norm_eps
    assert found.tie_word_embeddings == expected.tie_word_embeddings
    assert found.eos_token_ids == (expected.eos_token_id,)
    assert found.logit_softcap == getattr(expected, "final_logit_softcapping", None)
    assert found.scoring.softcap == getattr(expected, "attn_logit_softcapping", None)
    window = getattr(expected, "sliding_window", None)
    kinds = getattr(expected, "layer_types", None) or [SLIDING if window else FULL] * 7
    assert [found.scoring.window(i) for i in range(7)] == [window if kind == SLIDING else None for kind in kinds]
    rope = expected.rope_parameters.get(FULL, expected.rope_parameters)
    assert found.rope.theta == rope["rope_theta"]
    if found.local_rope is not None:
        assert found.local_rope.theta == expected.rope_parameters[SLIDING]["rope_theta"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {"sliding_window": 16}, "sliding_window = 16"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for LlamaForCausalLM"),
        ("Llama", {"layer_types": [FULL, SLIDING]}, "layers of type sliding_attention"),
        ("Qwen2", {"layer_types": [FULL, SLIDING]}, "of type sliding_attention, but no sliding_window"),
        ("Mistral", {"layer_types": [FULL, SLIDING], "sliding_window": 8}, "which is it"),
        ("Mistral", {"layer_types": [FULL, FULL], "sliding_window": 8}, "which is it"),
        ("Mistral", {"attention_bias": True}, "attention_bias = True"),
        ("Mistral", {"sliding_window": 8.5}, "sliding_window must be a whole number of at least 1, not 8.5"),
        ("Mistral", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("Gemma2", {"hidden_activation": "gelu"}, "activation 'gelu' is not supported; only gelu_pytorch_tanh is"),
        ("Gemma2", {"hidden_activation": None}, "activation None"),
        ("Gemma2", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("Gemma2", {"sliding_window": None}, "of type sliding_attention, but no sliding_window"),
        ("Gemma2", {"sliding_window_size": 5}, "which is it"),
        ("Gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be above 0"),
        ("Gemma2", {"final_logit_softcapping": -3}, "final_logit_softcapping must be above 0"),
        ("Gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ("Gemma2", {"query_pre_attn_scalar": None}, "lacks 'query_pre_attn_scalar'"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("Gemma2", {"layer_types": [FULL, "chunked_attention", FULL]}, "layers of type chunked_attention"),
        ("Gemma3", {"layer_types": [FULL]}, "1 entries for 3 layers"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta; they belong to a type of layer"),
        ("Gemma3", {"rope_parameters": {SLIDING: {"rope_type": "su"}}}, "rope type 'su'"),
        ("Gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        ("Gemma3", {"_sliding_window_pattern": 4}, "_sliding_window_pattern = 4"),
        ("Phi3", {"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3' is not supported for this"),
        ("Phi3", {"rope_parameters": LONGROPE, "partial_rotary_factor": 0.5}, "short_factor must be 4 numbers"),
        ("Phi3", {"rope_parameters": LONGROPE | {"long_factor": [0.0] * 8}}, "long_factor must be 8 numbers above 0"),
        ("Phi3", {"rope_parameters": LONGROPE | {"long_factor": ["x"] * 8}}, "could not convert"),
        ("Phi3", {"partial_rotary_factor": 0.35}, "must be an even number of its elements"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of head_dim 16"),
        ("Phi3", {"lm_head_bias": True}, "lm_head_bias = True"),
        ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("Olmo2", {"sliding_window": 8}, "sliding_window = 8"),
    ],
    ids=str,
)
def test_unsupported_features_of_a_family_are_refused_by_name(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    architecture = f"{family}ForCausalLM"
    known = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    config = SIZES | known | (GEMMA if "Gemma" in family else {}) | {"rope_theta": 1e4} | changes
    if "rope_parameters" in changes:
        del config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


VALUES = (None, True, -1, 0, 1, 7, 2.5, 1e308, float("inf"), float("nan"), "x", [], {}, [1], ["x", None], {"a": 1})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_any_value_of_a_key_is_read_or_refused_with_a_message(architecture: str) -> None:
    known = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    good = SIZES | known | {"sliding_window": 8} | (GEMMA if "Gemma" in architecture else {})
    for key in READ | FAMILIES[architecture].reads | {"layer_types", "hidden_act", "hidden_activation"}:
        for value in VALUES if key != "num_hidden_layers" else VALUES[:7]:
            with contextlib.suppress(ModelError):
                parse_config(good | {key: value}, {})


def test_a_window_that_hides_no_token_is_dropped(tmp_path: Path) -> None:
    for size, expected in ((127, (127, 127)), (128, ()), (10**12, ())):
        config = SIZES | {"architectures": ["MistralForCausalLM"], "sliding_window": size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path).scoring.windows == expected


def test_longrope_uses_the_factors_of_the_longest_served_sequence(tmp_path: Path) -> None:
    settings = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
    path = save(reference("Phi3", settings), tmp_path)
    short = Runner(ours(path, context_length=40)).feed(IDS[:40])
    np.testing.assert_allclose(short, theirs_of(path, IDS[:40]), rtol=1e-4, atol=2e-4)
    pieces = Runner(ours(path, context_length=41))
    long = torch.cat([pieces.feed(IDS[:30]), *(pieces.feed([token]) for token in IDS[30:41])])
    np.testing.assert_allclose(long, theirs_of(path, IDS[:41]), rtol=1e-4, atol=2e-4)
    assert not torch.allclose(short, long[:40], atol=0.1)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_are_known(name: str, tmp_path: Path) -> None:
    found = []
    for rope_type in (name, "longrope"):
        config = SIZES | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": LONGROPE | {"rope_type": rope_type}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(read_config(tmp_path))
    assert found[0] == found[1]
    assert found[0].rope.type == "longrope"


SIXTEEN_BITS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", GEMMA),
    "phi4-mini": ("Phi3", {"partial_rotary_factor": 0.75}),
    "olmo2": ("Olmo2", {}),
}


@pytest.mark.parametrize("case", SIXTEEN_BITS)
def test_bfloat16_is_bfloat16_throughout(case: str, tmp_path: Path) -> None:
    """Norm weights in float32 must not make other values float32."""
    path = save(reference(*SIXTEEN_BITS[case]).to(torch.bfloat16), tmp_path)
    runner = Runner(ours(path, dtype="bfloat16"))
    found = torch.cat((runner.feed(IDS[:30]), runner.feed(IDS[30:31])))
    assert found.dtype == torch.bfloat16
    expected = theirs_of(path, IDS[:31], torch.bfloat16)
    assert (found - expected).float().pow(2).mean().sqrt() < 0.05 * expected.float().std()


def test_one_plus_a_small_weight_is_not_rounded_to_bfloat16() -> None:
    norm = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(512, 1e-6).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    weight = (0.01 * torch.randn(512, generator=generator)).to(torch.bfloat16)
    x = torch.randn(8, 512, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(weight)
        expected = norm(x)
    kept, rounded = (TorchOps().norm(x, weight.to(dtype) + 1, 1e-6) for dtype in (torch.float32, torch.bfloat16))
    assert (kept == expected).float().mean() > 0.99
    assert (rounded == expected).float().mean() < 0.9


GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 13}),
    "gemma3": ("Gemma3", GEMMA | {"eos_token_id": None}),
    "olmo2": ("Olmo2", {"eos_token_id": None}),
}


@pytest.mark.parametrize("case", GENERATED)
def test_the_engine_generates_the_same_as_transformers(case: str, tmp_path: Path) -> None:
    """Prompts go beyond the window: in chunks, token by token, and after a cached prefix."""
    model = reference(*GENERATED[case])
    path = save(model, tmp_path)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([IDS]), max_new_tokens=20, do_sample=False)[0, len(IDS) :].tolist()
    engine = Harness(path, load_format="auto", chunked_prefill_size=16)
    assert engine.generate("chunks", IDS, max_new_tokens=20) == expected
    assert engine.generate("cached", [*IDS, *expected[:4]], max_new_tokens=16) == expected[4:]
    assert engine.outs["cached"][0].cached_tokens > len(IDS) - 8
