"""Weights in fp8: served as the formats define them, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file
from support import fp8
from support.fp8 import BLOCKS, FINE_GRAINED, FORMATS, INPUTS, STATIC, STATIC_SCALE, WEIGHTS, Inputs, compressed
from support.runtime_engine import Harness, write_config
from support.runtime_models import IDS, Runner, ours, reference, save
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.quantization.fp8 import dequantise, quantise, to_e4m3
from treeline_runtime.models.quantization.scheme import Scheme, read_scheme

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of more than one block, the last one partial."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
    return save(reference("Qwen3", sizes), tmp_path_factory.mktemp("wide"))


@pytest.fixture
def wide(wide_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wide_path, tmp_path / "wide"))


def meant_by(path: Path, weights: dict[str, torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """Return transformers' logits with these weights, where hooks round the inputs of projections to fp8."""
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": None}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    model.load_state_dict(weights)
    for name, module in model.named_modules():
        if f"{name}.weight".endswith(fp8.PROJECTIONS):
            module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_in_fp8_follows_its_format(name: str, wide: Path) -> None:
    settings, kind, suffix, more, inputs = FORMATS[name]
    meant = fp8.quantise_checkpoint(wide, settings, kind, suffix, **more)
    expected = meant_by(wide, meant, inputs)
    logits = Runner(ours(wide)).feed(IDS)
    # an activation that lies in the middle of two numbers may become either
    assert distance(logits, expected) < 0.01
    # nothing is left out: neither the weights' scales nor what becomes of the inputs
    assert distance(meant_by(wide, meant, lambda x: x), expected) > 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_one_projection_follows_its_format(name: str, wide: Path) -> None:
    settings, kind, suffix, more, inputs = FORMATS[name]
    meant = fp8.quantise_checkpoint(wide, settings, kind, suffix, **more)
    model = ours(wide)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    x[4] = 0
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    expected = inputs(x) @ torch.cat([meant[name] for name in names]).t()
    found = model._layers[1]._feed_forward._gate_up(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_of_fine_grained_fp8_equal_transformers(tmp_path: Path) -> None:
    """Its products need GPUs; dequantising works anywhere."""
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    path = save(reference("Qwen3", sizes), tmp_path)
    fp8.quantise_checkpoint(path, FINE_GRAINED, "block", "weight_scale_inv")
    tensors = load_file(path / "model.safetensors")

    def stacked(layer: int, module: str, *names: str) -> torch.Tensor:
        weights = [f"model.layers.{layer}.{module}.{name}_proj.weight" for name in names]
        return torch.cat(
            [theirs._dequantize_one(tensors[w], tensors[f"{w}_scale_inv"], torch.float32) for w in weights]
        )

    for i, layer in enumerate(ours(path)._layers):
        for linear, parts in (
            (layer._attention._qkv, ("self_attn", "q", "k", "v")),
            (layer._attention._o, ("self_attn", "o")),
            (layer._feed_forward._gate_up, ("mlp", "gate", "up")),
            (layer._feed_forward._down, ("mlp", "down")),
        ):
            torch.testing.assert_close(linear._product._plain.weight.to_dense(), stacked(i, *parts), rtol=1e-6, atol=0)


def test_weights_are_quantised_at_load_with_a_scale_for_each_output(wide: Path) -> None:
    meant = {
        name: fp8.quantised(tensor, "channel")[2] if name.endswith(fp8.PROJECTIONS) else tensor
        for name, tensor in load_file(wide / "model.safetensors").items()
    }
    expected = meant_by(wide, meant, fp8.rounded_rows)
    model = ours(wide, quantization="fp8")
    assert distance(Runner(model).feed(IDS), expected) < 0.01
    plain = ours(wide)
    assert 0.02 < distance(Runner(model).feed(IDS), Runner(plain).feed(IDS)) < 0.3
    heads = [one._head.weight.to_dense() for one in (model, plain)]
    assert torch.equal(*heads)  # it decides between near tokens: it stays as it is


def test_a_quantised_checkpoint_is_unchanged_when_fp8_is_requested(wide: Path) -> None:
    fp8.quantise_checkpoint(wide, compressed(), "channel")
    assert torch.equal(Runner(ours(wide, quantization="fp8")).feed(IDS), Runner(ours(wide)).feed(IDS))


def test_unquantised_modules_are_computed_in_float(wide: Path) -> None:
    """A whole layer is in float: it has no scales, so its inputs are not rounded either."""
    original = load_file(wide / "model.safetensors")
    fp8.quantise_checkpoint(wide, compressed(ignore=["lm_head", "re:model.layers.0.*"]), "channel")
    tensors = load_file(wide / "model.safetensors")
    first = [name for name in original if name.startswith("model.layers.0.") and name.endswith(fp8.PROJECTIONS)]
    for name in first:
        tensors[name] = original[name]
        del tensors[f"{name}_scale"]
    save_file(tensors, wide / "model.safetensors")
    model = ours(wide)
    x = torch.randn(2, 192, generator=torch.Generator().manual_seed(0))
    gate_up = torch.cat([original[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    torch.testing.assert_close(model._layers[0]._feed_forward._gate_up(x), x @ gate_up.t())
    assert distance(model._layers[1]._feed_forward._gate_up(x), x @ gate_up.t()) > 0.5


def test_an_engine_serves_a_checkpoint_in_fp8_and_random_weights_too(wide: Path, tmp_path: Path) -> None:
    fp8.quantise_checkpoint(wide, FINE_GRAINED, "block", "weight_scale_inv")
    found = Harness(wide, load_format="auto", chunked_prefill_size=16).generate("a", IDS, max_new_tokens=8)
    assert len(found) == 8
    assert found == Harness(wide, load_format="auto").generate("a", IDS, max_new_tokens=8)
    random = write_config(tmp_path / "random", quantization_config=FINE_GRAINED)
    plain = write_config(tmp_path / "plain")
    of_random = Harness(random).generate("a", IDS, max_new_tokens=8)
    assert of_random == Harness(plain, quantization="fp8").generate("a", IDS, max_new_tokens=8)


# ---- numbers ----------------------------------------------------------------------------------------------


def floats(rows: int, columns: int) -> st.SearchStrategy[Any]:
    # larger than what a group of zeros is taken for, up to what float16 holds
    sizes = st.floats(2**-30, 2**16, width=32) | st.floats(-(2**16), -(2**-30), width=32) | st.just(0.0)
    return arrays.arrays(np.float32, (rows, columns), elements=sizes)


@given(floats(2, 40), st.sampled_from([8, 16, 40]))
def test_rounding_to_fp8_errs_by_at_most_half_a_step(x: Any, group: int) -> None:
    tensor = torch.from_numpy(x)
    values, scales = quantise(tensor, group)
    assert scales.shape == (-(-40 // group), 2)
    each = scales.t().repeat_interleave(group, 1)[:, :40]
    # 3 bits of mantissa: a step is an eighth, half of it a sixteenth; below 2^-6 steps are 2^-9
    bound = torch.maximum(tensor.abs() / 16, each * 2**-10)
    assert ((dequantise(values, scales, group) - tensor).abs() <= bound * (1 + 1e-5)).all()
    assert values.float().abs().max() <= fp8.LARGEST
    again = quantise(dequantise(values, scales, group), group, None)
    torch.testing.assert_close(dequantise(*again, group), dequantise(values, scales, group), rtol=1e-5, atol=0)


@given(
    arrays.arrays(np.float32, 50, elements=st.floats(-500, 500, width=32) | st.sampled_from(fp8.VALUES[:127].tolist()))
)
def test_a_number_becomes_the_nearest_fp8(x: Any) -> None:
    found = to_e4m3(torch.from_numpy(x)).view(torch.uint8).numpy()
    assert np.array_equal(found, fp8.nearest(x.astype(np.float64)))


def test_non_finite_numbers_become_nan_in_fp8() -> None:
    assert to_e4m3(torch.tensor([torch.inf, -torch.inf, torch.nan])).float().isnan().all()
    for wrong in (torch.inf, -torch.inf, torch.nan):
        for static in (None, 0.1):
            x = torch.ones(3, 16)
            x[1, 5] = wrong
            finite = dequantise(*quantise(x, 16, static), 16).isfinite().all(1)
            assert finite.tolist() == [True, False, True]


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "quantization_config.quant_method = 'awq'"),
        (
            {"quant_method": "gptq", "bits": 4},
            r"quant_method = 'gptq' is .*\(--quantization fp8 quantises it at load\)",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes'"),
        ({"bits": 4}, "quant_method = None"),
        ("fp8", "quantization_config = 'fp8'"),
        (FINE_GRAINED | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\] .* only 128 x 128"),
        (FINE_GRAINED | {"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        (FINE_GRAINED | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FINE_GRAINED | {"activation_scheme": "static"}, "'static' with a weight_block_size"),
        ({"quant_method": "fp8"}, "activation_scheme = None"),
        (FINE_GRAINED | {"a_key_of_tomorrow": 1}, "quantization_config.a_key_of_tomorrow = 1"),
        (FINE_GRAINED | {"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
        (compressed(format="pack-quantized"), "format = 'pack-quantized'"),
        (compressed(format="nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized'"),
        (compressed(quantization_status="frozen"), "quantization_status = 'frozen'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (compressed(config_groups={}), "config_groups"),
        (compressed(config_groups={"group_0": "W8A8"}), "config_groups.group_0 = 'W8A8'"),
        (compressed(WEIGHTS | {"num_bits": 4}), "group_0.weights.num_bits = 4"),
        (compressed(WEIGHTS | {"type": "int"}), "group_0.weights.type = 'int'"),
        (compressed(WEIGHTS | {"strategy": "group", "group_size": 64}), "weights.strategy = 'group'"),
        (compressed(WEIGHTS | {"symmetric": False}), "weights.symmetric = False"),
        (compressed(WEIGHTS | {"symmetric": 1}), "weights.symmetric = 1"),
        (compressed(WEIGHTS | {"dynamic": True}), "weights.dynamic = True"),
        (compressed(BLOCKS | {"block_structure": [128, 64]}), r"block_structure = \[128, 64\]"),
        (compressed(WEIGHTS | {"strategy": "block"}), "block_structure = None does not fit"),
        (compressed(BLOCKS), "input_activations.strategy = 'token'"),
        (compressed(BLOCKS, INPUTS | {"strategy": "group", "group_size": 64}), "input_activations.group_size = 64"),
        (compressed(WEIGHTS | {"group_size": 128}), "weights.group_size = 128"),
        (compressed(inputs=None), r"input_activations = None \(only the weights in fp8\)"),
        (compressed(inputs=INPUTS | {"dynamic": "local"}), "input_activations"),
        (compressed(inputs=INPUTS | {"dynamic": False}), "input_activations.strategy = 'token'"),
        (compressed(kv_cache_scheme=WEIGHTS | {"num_bits": 4, "strategy": "tensor"}), "kv_cache_scheme.num_bits = 4"),
        (compressed(kv_cache_scheme=WEIGHTS), "kv_cache_scheme.strategy = 'channel'"),
    ],
    ids=str,
)
def test_formats_that_are_not_served_are_refused_by_name(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        read_config(write_config(tmp_path, quantization_config=settings))


def test_several_groups_of_one_scheme_are_one_and_of_two_are_refused() -> None:
    group = compressed()["config_groups"]["group_0"]
    assert read_scheme({"quantization_config": compressed(config_groups={"a": group, "b": group})}) == Scheme()
    other = group | {"input_activations": INPUTS | {"dynamic": False, "strategy": "tensor"}}
    with pytest.raises(ValueError, match="several schemes"):
        read_scheme({"quantization_config": compressed(config_groups={"a": group, "b": other})})


def test_settings_as_transformers_writes_them_are_known() -> None:
    written = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    written = json.loads(json.dumps(written, default=lambda value: value.value))
    assert read_scheme({"quantization_config": written}) == Scheme("blocks")
    assert read_scheme({"quantization_config": None}) is None


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q + "weight_scale": None}, f"{Q[:-7]}k_proj is quantised and {Q[:-1]} is not"),
        ({Q + "weight_scale": torch.ones(3, 1)}, rf"{Q}weight_scale has shape \(3, 1\): not one scale"),
        ({Q + "weight": torch.ones(192, 192)}, f"tensor {Q}weight is torch.float32, but as it has a scale"),
        ({Q + "weight": torch.ones(3, 192).to(torch.float8_e4m3fn)}, rf"{Q}weight has shape \(3, 192\)"),
        ({Q + "weight": torch.ones(192, 192).to(torch.float8_e5m2)}, "is torch.float8_e5m2, but"),
        ({Q + "input_scale": torch.ones(1)}, f"does not have, e.g. {Q}input_scale"),
        ({Q + "weight_zero_point": torch.zeros(1)}, f"does not have, e.g. {Q}weight_zero_point"),
        ({"model.layers.0.self_attn.q_scale": torch.ones(1)}, "does not have, e.g. model.layers.0.self_attn.q_scale"),
        ({"lm_head.weight": torch.ones(128, 192).to(torch.float8_e4m3fn)}, "lm_head.weight is torch.float8_e4m3fn"),
        ({"model.layers.0.self_attn.k_scale": torch.zeros(1)}, r"k_scale is not one positive number, but \[0.0\]"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(torch.nan)}, r"v_scale is not one positive number"),
        ({"model.layers.1.self_attn.v_scale": torch.ones(4)}, r"v_scale is not one positive number"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_the_format_are_refused_by_name(
    wide: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    fp8.quantise_checkpoint(wide, compressed(), "channel")
    tensors = load_file(wide / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, wide / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        ours(wide)


def test_an_unquantised_checkpoint_declared_quantised_is_refused(wide: Path) -> None:
    config = json.loads((wide / "config.json").read_text()) | {"quantization_config": compressed()}
    (wide / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has a quantization_config, but no tensor has a scale"):
        ours(wide)


def test_a_static_scheme_needs_its_scales_and_a_block_wise_one_the_shape_of_its_blocks(wide: Path) -> None:
    original = load_file(wide / "model.safetensors")
    fp8.quantise_checkpoint(wide, STATIC, "tensor")
    with pytest.raises(ModelError, match=rf"tensor {Q}input_scale is missing"):
        ours(wide)
    save_file(original, wide / "model.safetensors")
    fp8.quantise_checkpoint(wide, FINE_GRAINED, "channel", "weight_scale_inv")
    with pytest.raises(ModelError, match=rf"{Q}weight_scale_inv has shape \(192, 1\), config.json asks for \(2, 2\)"):
        ours(wide)


def test_differing_static_scales_of_stacked_projections_clip_nothing(wide: Path) -> None:
    fp8.quantise_checkpoint(wide, STATIC, "tensor", input_scale=torch.tensor(STATIC_SCALE))
    tensors = load_file(wide / "model.safetensors") | {Q + "input_scale": torch.tensor(0.05)}
    save_file(tensors, wide / "model.safetensors")
    model: Decoder = ours(wide)
    x = torch.full((1, 192), 0.05 * 300)
    qkv = model._layers[0]._attention._qkv(x)
    values = [
        tensors[f"{Q[:-7]}{name}_proj.weight"].float() * tensors[f"{Q[:-7]}{name}_proj.weight_scale"] for name in "qkv"
    ]
    torch.testing.assert_close(qkv, fp8.rounded(x, 0.05).float() @ torch.cat(values).t(), rtol=1e-4, atol=1e-3)
