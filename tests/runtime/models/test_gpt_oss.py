"""gpt-oss: logits equal those of transformers, with whole weights and with MXFP4; unsupported settings are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mxfp4 import packed
from support.runtime_engine import Harness, assert_generates_the_same
from support.runtime_models import IDS, Runner, config_of, fed_in_pieces, logits_of, ours, reference, save
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.moe import MoeDecoder, dequantise

transformers = pytest.importorskip("transformers")

SIZES = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9, "num_hidden_layers": 3}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "one expert": {"num_experts_per_tok": 1},
    "four experts": {"num_experts_per_tok": 4, "swiglu_limit": 0.5, "swiglu_alpha": 1.3},
    "no windows": {"layer_types": ["full_attention"] * 3, "rope_parameters": PLAIN_ROPE},
    "windows alone": {"layer_types": ["sliding_attention"] * 3, "num_key_value_heads": 4},
    "no biases": {"attention_bias": False, "tie_word_embeddings": True},
}


def new_reference(changes: dict[str, Any]) -> Any:
    theirs = reference("GptOss", SIZES | changes)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter) * 2)
    return theirs


def assert_close(found: torch.Tensor, logits: torch.Tensor) -> None:
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = new_reference(CASES[case])
    model = ours(save(theirs, tmp_path))
    assert isinstance(model, MoeDecoder)
    logits = logits_of(theirs)
    assert_close(Runner(model).feed(IDS), logits)
    assert_close(fed_in_pieces(model), logits)


def test_many_sequences_at_once_equal_transformers(tmp_path: Path) -> None:
    theirs = new_reference({})
    assert_generates_the_same(Harness(save(theirs, tmp_path), load_format="auto", chunked_prefill_size=16), theirs)


# ---- MXFP4 ------------------------------------------------------------------------------------------------


def test_mxfp4_experts_are_made_whole_as_transformers_makes_them(tmp_path: Path) -> None:
    theirs = new_reference({})
    path = packed(tmp_path, theirs)
    assert_close(Runner(ours(path)).feed(IDS), logits_of(theirs))


def test_every_byte_and_scale_of_mxfp4_is_decoded_by_the_format() -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16)
    found = dequantise(blocks, scales).double()
    pairs = torch.tensor([(numbers[byte & 15], numbers[byte >> 4]) for byte in range(256)], dtype=torch.float64)
    for scale in range(255):
        # the largest scale times 3 and more is beyond float32, as it is beyond bfloat16
        expected = (pairs.flatten() * math.ldexp(1.0, scale - 127)).float().double()
        assert torch.equal(found[scale], expected), scale
    assert not dequantise(blocks[:1], torch.full((1, 16), 255, dtype=torch.uint8)).isfinite().all()


def test_checkpoints_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    path = packed(tmp_path, new_reference({}))
    file = path / "model.safetensors"
    good = load_file(file)
    blocks, scales = (f"model.layers.1.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))
    for tensors, message in (
        ({k: v for k, v in good.items() if k != scales}, f"tensor {scales} is missing"),
        ({k: v for k, v in good.items() if k != blocks}, "tensor model.layers.1.mlp.experts.down_proj is missing"),
        (good | {blocks: good[blocks].to(torch.int8)}, f"tensor {blocks} is torch.int8, but .*should be torch.uint8"),
        (good | {blocks: good[blocks][:, :32].contiguous()}, rf"tensor {blocks} has shape \(6, 32, 3, 16\)"),
        (good | {"model.layers.1.mlp.experts.down_proj": torch.zeros(6, 96, 64)}, "2 tensors that this model does not"),
    ):
        save_file(tensors, file)
        with pytest.raises(ModelError, match=message):
            ours(path)


# ---- config.json ------------------------------------------------------------------------------------------


def test_published_configs_are_accepted_with_the_defaults_of_transformers(tmp_path: Path) -> None:
    whole = read_config(config_of(tmp_path, "GptOss"))
    assert whole.scoring.windows[:3] == (128, None, 128)
    assert whole.longest_context == 131072
    names = (
        "attention_bias head_dim layer_types num_experts_per_tok num_key_value_heads rms_norm_eps rope_parameters "
        "sliding_window swiglu_alpha swiglu_limit tie_word_embeddings"
    )
    assert read_config(config_of(tmp_path, "GptOss", **dict.fromkeys(names.split(), ...))) == whole
    rope = {
        "rope_parameters": ...,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    }
    published = {"experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9}
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    assert read_config(config_of(tmp_path, "GptOss", **rope, **published, **quantization)) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "fp8 weights are not"),
        ({"quantization": {"quant_method": "mxfp4"}}, "quantization .*'mxfp4'.* not supported"),
        ({"experts_per_token": 2}, "another experts_per_token"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 experts, but there are 128"),
        ({"swiglu_limit": None}, "swiglu_limit must be numbers above 0"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha must be above 0"),
        ({"initial_context_length": 8192}, "initial_context_length = 8192"),
        ({"layer_types": ["chunked_attention"] * 36}, "chunked_attention are not supported"),
        ({"sliding_window": None}, "no sliding_window"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True"),
    ],
    ids=str,
)
def test_unsupported_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(config_of(tmp_path, "GptOss", **changes))
