"""Logits with an adapter equal those of transformers' model into which peft has merged it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import runtime_media as media
from support.adapters import ATTENTION, shapes_of, write_adapter
from support.ranks import on_ranks
from support.runtime_models import IDS, Runner, fed_in_pieces, logits_of, ours, reference, save
from treeline_runtime.config import EngineConfig
from treeline_runtime.models.adapters import Adapter, read_adapter
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import load_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {}, ALL),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, ALL),
    "mistral": ("Mistral", {"sliding_window": 10}, ALL),
    "qwen2": ("Qwen2", {}, ALL),
    "qwen3": ("Qwen3", {"head_dim": 24}, ALL),
    "phi3": ("Phi3", {"pad_token_id": 0}, PACKED),
    "olmo2": ("Olmo2", {}, ALL),
    "gemma2": ("Gemma2", {"head_dim": 24, "sliding_window": 10, "query_pre_attn_scalar": 40}, ALL),
    "gemma3": ("Gemma3", {"head_dim": 24, "sliding_window": 10, "query_pre_attn_scalar": 40}, ALL),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}, ATTENTION),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}, ATTENTION),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, ATTENTION),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"r": 16, "use_rslora": True},
    "patterns": {"r": 4, "rank_pattern": {"q_proj": 12, "layers.1.mlp.down_proj": 32}, "alpha_pattern": {"up_proj": 3}},
    "some-layers": {"r": 8, "layers_to_transform": [1]},
    "rank-1": {"r": 1},
}


def merged(theirs: Any, folder: Path, targets: tuple[str, ...], **settings: Any) -> Any:
    """Save an adapter of the model. Return the model with it merged in."""
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 12, "target_modules": list(targets), **settings})
    made = peft.get_peft_model(theirs, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save_pretrained(folder)
    return made.merge_and_unload()


def read(model: Decoder, folder: Path) -> Adapter:
    return read_adapter(folder, model.sites, model.config.num_layers, 64, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    name, changes, targets = FAMILIES[family]
    theirs = reference(name, changes)
    model = ours(save(theirs, tmp_path / "base"))
    plain = logits_of(theirs)
    expected = logits_of(merged(theirs, tmp_path / "adapter", targets))
    assert (expected - plain).abs().max() > 0.1, "the adapter changes something"
    torch.testing.assert_close(fed_in_pieces(model, read(model, tmp_path / "adapter")), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fed_in_pieces(model), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
def test_scales_ranks_and_layers_are_those_of_peft(settings: str, tmp_path: Path) -> None:
    theirs = reference("Llama", {})
    model = ours(save(theirs, tmp_path / "base"))
    expected = logits_of(merged(theirs, tmp_path / "adapter", ALL, **SETTINGS[settings]))
    torch.testing.assert_close(fed_in_pieces(model, read(model, tmp_path / "adapter")), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_decoders_beside_an_encoder_have_adapters(family: str, tmp_path: Path) -> None:
    theirs = media.reference(family)
    model = ours(save(theirs, tmp_path / "base"))
    prompt = media.Prompt(4, ("image", (1, 6, 4)), 5)
    with torch.inference_mode():
        plain = theirs(**prompt.for_transformers()).logits[0]
    changed = merged(theirs, tmp_path / "adapter", ATTENTION)
    with torch.inference_mode():
        expected = changed(**prompt.for_transformers()).logits[0]
    assert (expected - plain).abs().max() > 0.1
    runner = media.MediaRunner(model, prompt.items, read(model, tmp_path / "adapter"))
    torch.testing.assert_close(runner.feed(prompt.ids), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    theirs = media.reference("Qwen3VL")
    model = ours(save(theirs, tmp_path / "base"))
    merged(theirs, tmp_path / "adapter", ("qkv",))
    with pytest.raises(ModelError, match=r"the adapter changes visual\.blocks\.[0-3]\.attn\.qkv"):
        read(model, tmp_path / "adapter")


@pytest.mark.parametrize(("family", "changes", "stages"), [
    ("Llama", {}, 1), ("Llama", {"num_key_value_heads": 1}, 1), ("Phi3", {"pad_token_id": 0}, 1), ("Llama", {}, 2),
    ("Qwen3Moe", {**EXPERTS, "head_dim": 16}, 1),
])  # fmt: skip
def test_ranks_compute_what_one_does(family: str, changes: dict[str, Any], stages: int, tmp_path: Path) -> None:
    base = save(reference(family, changes), tmp_path / "base")
    whole = ours(base)
    adapter = write_adapter(tmp_path / "adapter", shapes_of(whole.sites), rank=16, size=0.2)
    expected = Runner(whole, adapter=read(whole, adapter)).feed(IDS)
    config = EngineConfig(model=str(base), device="cpu", tp_size=2, pp_size=stages)

    def compute(ranks: Any) -> tuple[str, torch.Tensor]:
        model = load_model(config, ranks)
        part = read(model, adapter)
        return part.digest, Runner(model, adapter=part).feed(IDS)

    if stages > 1:  # the first stage has nothing of it
        shapes = {name: shape for name, shape in shapes_of(whole.sites).items() if name.startswith("layers.1.")}
        adapter = write_adapter(tmp_path / "some", shapes, rank=16, size=0.2)
        expected = Runner(whole, adapter=read(whole, adapter)).feed(IDS)
    results = on_ranks(2, compute, stages)
    torch.testing.assert_close(results[0][1], expected, atol=1e-4, rtol=1e-4)
    assert {digest for digest, _ in results} == {read(whole, adapter).digest}
