"""Llama 4's text models: logits equal transformers', with and without images around them; what differs is refused."""

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
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.llama4 import Llama4Decoder
from treeline_runtime.models.pooling import pooling_of
from treeline_runtime.models.scoring import Scoring

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


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_says_whether_its_head_is_tied(tmp_path: Path, tied: bool) -> None:
    theirs = new_wrapped({"tie_word_embeddings": tied})
    path = save(theirs, tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert not config["tie_word_embeddings"], "what transformers writes around a tied one"
    for around in (False, True):
        model = ours(write(path, config | {"tie_word_embeddings": around}))
        assert model.config.tie_word_embeddings == tied
        assert_close(Runner(model).feed(IDS), logits_of(theirs))


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


# ---- config.json ------------------------------------------------------------------------------------------

EVERY_FOURTH = [int((layer + 1) % 4 != 0) for layer in range(48)]


def write(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(path: Path, **changes: Any) -> Path:
    """What transformers writes for a default configuration, with keys changed; ... removes one."""
    config = transformers.Llama4TextConfig().to_dict() | {"architectures": ["Llama4ForCausalLM"]}
    return write(path, {key: value for key, value in (config | changes).items() if value is not ...})


def wrapped(path: Path, around: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The same as the text part of one with images."""
    config = transformers.Llama4Config().to_dict() | {"architectures": ["Llama4ForConditionalGeneration"]}
    text = json.loads((config_of(path, **changes) / "config.json").read_text())
    return write(path, config | {"text_config": text, "vision_config": {"model_type": "x"}} | (around or {}))


def test_what_is_published_is_accepted_and_a_missing_key_means_what_it_means_to_transformers(tmp_path: Path) -> None:
    whole = read_config(config_of(tmp_path))
    assert whole.irope is not None
    assert whole.moe is not None
    assert whole.scoring.windows[:5] == (8192, 8192, 8192, None, 8192)
    assert whole.scoring.chunked
    assert whole.irope.rotated == {layer for layer in range(48) if EVERY_FOURTH[layer]}
    assert (whole.intermediate_size, whole.moe.intermediate_size) == (16384, 8192)
    names = (
        "attention_bias attention_chunk_size attn_scale attn_temperature_tuning eos_token_id floor_scale head_dim "
        "interleave_moe_layer_step intermediate_size_mlp layer_types moe_layers no_rope_layer_interval no_rope_layers "
        "num_experts_per_tok num_key_value_heads num_local_experts rms_norm_eps rope_parameters tie_word_embeddings "
        "use_qk_norm"
    )
    assert read_config(config_of(tmp_path, **dict.fromkeys(names.split(), ...))) == whole
    old = {"attn_temperature_tuning": 4, "no_rope_layers": [], "for_llm_compressor": False, "rope_theta": 500000.0}
    assert read_config(config_of(tmp_path, rope_parameters=..., rope_scaling=None, **old)) == whole
    assert read_config(wrapped(tmp_path, torch_dtype="bfloat16")) == whole
    assert pooling_of(tmp_path) is None


def test_maverick_has_experts_on_every_second_layer(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "moe_layers": ...,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "num_local_experts": 128,
    }
    model = read_config(wrapped(tmp_path, **changes))
    assert model.moe is not None
    assert model.moe.layers == set(range(1, 48, 2))
    assert not model.qk_norm


GUARD: dict[str, Any] = {
    "attention_chunk_size": None,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "no_rope_layer_interval": 80,
    "num_local_experts": 0,
    "use_qk_norm": False,
}
"""Llama Guard 4 as it is published: dense, with rope everywhere and no chunks."""


def test_llama_guard_has_neither_experts_nor_chunks(tmp_path: Path) -> None:
    one_chunk = {"attention_chunk_size": 64}  # without any, transformers of today cannot run it
    theirs = new_reference(one_chunk | {"moe_layers": [], "no_rope_layers": [1] * 4, "use_qk_norm": False})
    path = save(theirs, tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"no_rope_layers": []}
    model = ours(write(path, config | GUARD))
    assert model.config.moe is None
    assert model.config.scoring == Scoring()
    assert_close(Runner(model).feed(IDS), logits_of(theirs))
    for found in (wrapped(tmp_path, no_rope_layers=[], layer_types=..., **GUARD), config_of(tmp_path, **GUARD)):
        assert read_config(found).scoring.windows == ()


def test_null_within_is_not_a_missing_key_but_does_not_take_back_what_is_around(tmp_path: Path) -> None:
    model = read_config(wrapped(tmp_path, {"eos_token_id": 7}, num_key_value_heads=None, eos_token_id=None))
    assert (model.num_heads, model.num_kv_heads) == (40, 40)
    assert model.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size must be a whole number of at least 1, not 0"),
        ({"attention_chunk_size": 8192.5}, "attention_chunk_size must be a whole number"),
        ({"layer_types": ["sliding_attention"] * 48}, "layers of type sliding_attention are not supported"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must have a 0 or 1 for each of 48 layers"),
        ({"no_rope_layers": [2] * 48}, "no_rope_layers must have a 0 or 1"),
        ({"no_rope_layers": ..., "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole number"),
        ({"moe_layers": ["1"]}, "moe_layers must be a list of layers' numbers"),
        ({"moe_layers": [48]}, "moe_layers has layer 48, but there are 48"),
        ({"moe_layers": ..., "interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be a whole number"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17 experts, but there are 16"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning must be true or false, not 'yes'"),
        ({"floor_scale": 0}, "floor_scale must be above 0"),
        ({"attn_scale": None}, "attn_scale must be a number, not None"),
        ({"use_qk_norm": "no"}, "use_qk_norm must be true or false"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported for Llama 4"),
        ({"for_llm_compressor": True}, "for_llm_compressor = True"),
        ({"model_type": "llama4"}, "but model_type 'llama4': which is it"),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "fp8 weights are not supported for Llama4ForCausalLM, which has experts",
        ),
        (
            {"moe_layers": [], "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "fp8 weights are not supported for Llama4ForCausalLM; take the unquantised",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(config_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("around", "message"),
    [
        ({"text_config": None}, "a Llama4ForConditionalGeneration has a text_config"),
        ({"model_type": "llama"}, "architecture Llama4ForConditionalGeneration, but model_type 'llama'"),
        ({"audio_config": {}}, "audio_config = {}"),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "fp8 weights are not supported for Llama4ForCausalLM, which has experts",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_served_of_one_with_images_is_named(
    tmp_path: Path, around: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(wrapped(tmp_path, around))


def test_two_quantizations_are_one_too_many(tmp_path: Path) -> None:
    around, within = ({"quantization_config": {"quant_method": method}} for method in ("fp8", "awq"))
    with pytest.raises(ModelError, match="quantization_config, and another in its text_config"):
        read_config(wrapped(tmp_path, around, **within))


def test_experts_are_not_quantised_as_they_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--quantization fp8 is not supported for Llama4ForCausalLM"):
        ours(save(new_reference({"num_hidden_layers": 1}), tmp_path), quantization="fp8")


def test_windows_that_hide_nothing_of_a_context_are_none() -> None:
    scoring = Scoring(windows=(8, None, 4), chunked=True)
    assert scoring.within(9) == scoring
    assert scoring.within(8) == Scoring(windows=(None, None, 4), chunked=True)
    assert scoring.within(4) == Scoring()


def test_random_weights_are_repeatable_and_of_the_right_sizes(tmp_path: Path) -> None:
    path = save(new_reference({"interleave_moe_layer_step": 2}), tmp_path)
    first, second = (Runner(ours(path, load_format="dummy")).feed(IDS) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert 0.1 < first.std() < 10
