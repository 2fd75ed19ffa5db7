"""Llama 4's text models: logits equal those of transformers, from either kind of checkpoint; what differs is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runtime_engine import Harness, assert_generates_the_same
from support.runtime_models import IDS, SIZES, Runner, fed_in_pieces, logits_of, ours, save
from treeline_runtime.models import ModelConfig, ModelError
from treeline_runtime.models.llama4 import Llama4Decoder
from treeline_runtime.models.pooling import pooling_of

transformers = pytest.importorskip("transformers")

TEXT = SIZES | {
    "pad_token_id": None,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 5,
    "attn_scale": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "scout": {"rope_parameters": LLAMA3},
    "maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False},
    "chunks that no page or prompt fits": {"attention_chunk_size": 11, "no_rope_layer_interval": 2},
    "a chunk a token": {"attention_chunk_size": 1},
    "a chunk for all": {"attention_chunk_size": 64, "num_key_value_heads": 4},
    "all with rope": {"no_rope_layers": [1] * 4, "attn_temperature_tuning": False},
    "none with rope": {"no_rope_layers": [0, 0], "num_hidden_layers": 2},
    "no temperature": {"attn_temperature_tuning": False, "interleave_moe_layer_step": 2},
    "two experts, biases": {"num_experts_per_tok": 2, "attention_bias": True, "tie_word_embeddings": True},
    "all dense": {"moe_layers": [], "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "types that do not follow rope": {"layer_types": ["full_attention", "chunked_attention"] * 2},
    "yarn": {"use_qk_norm": False, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
}


def noisy(model: Any) -> Any:
    """Nothing of it is a constant: a mistake there would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def new_reference(changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return noisy(transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**(TEXT | changes))))


def assert_close(found: torch.Tensor, logits: torch.Tensor) -> None:
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = new_reference(CASES[case])
    model = ours(save(theirs, tmp_path))
    assert isinstance(model, Llama4Decoder)
    logits = logits_of(theirs)
    assert_close(Runner(model).feed(IDS), logits)
    assert_close(fed_in_pieces(model), logits)


def test_many_sequences_at_once_are_what_transformers_generates(tmp_path: Path) -> None:
    theirs = new_reference({"interleave_moe_layer_step": 2})
    assert_generates_the_same(Harness(save(theirs, tmp_path), load_format="auto", chunked_prefill_size=16), theirs)


# ---- with images around it --------------------------------------------------------------------------------

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def new_wrapped(changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=TEXT | changes, vision_config=VISION)
    return noisy(transformers.Llama4ForConditionalGeneration(config))


def test_the_language_model_of_one_with_images_is_served_alone(tmp_path: Path) -> None:
    theirs = new_wrapped({"rope_parameters": LLAMA3})
    path = save(theirs, tmp_path, max_shard_size="100KB")
    names = set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"])
    assert {name.partition(".")[0] for name in names} == {"language_model", "multi_modal_projector", "vision_model"}
    assert_close(Runner(ours(path)).feed(IDS), logits_of(theirs))
    assert pooling_of(path) is pooling_of(path, "generate") is None


def test_what_is_missing_or_spare_in_the_language_model_is_named_as_the_files_name_it(tmp_path: Path) -> None:
    path = save(new_wrapped({}), tmp_path)
    file = path / "model.safetensors"
    good = load_file(file)
    layer = "language_model.model.layers.1."
    down = f"{layer}feed_forward.experts.down_proj"
    for tensors, message in (
        ({k: v for k, v in good.items() if k != down}, f"tensor {down} is missing"),
        (good | {down: torch.zeros(4, 64, 24)}, rf"tensor {down} has shape \(4, 64, 24\), .* asks for \(4, 24, 64\)"),
        (good | {f"{layer}self_attn.q_norm.weight": torch.ones(16)}, "1 tensors that this model does not have"),
        (good | {"vision_model.spare": torch.ones(1)}, None),
    ):
        save_file(tensors, file)
        if message is None:
            ours(path)
            continue
        with pytest.raises(ModelError, match=message):
            ours(path)
