"""Parameters are counted as transformers has them, and as our decoder takes them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from treeline_runtime.memory import bytes_per_token
from treeline_runtime.models import read_config
from treeline_runtime.models.config import parse_config
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import _decoder
from treeline_runtime.models.quantization.scheme import ONLINE, Scheme
from treeline_runtime.models.shards import Rank
from treeline_runtime.models.sizes import parts_of
from treeline_runtime.models.weights import WHOLE, RandomWeights

ROOT = Path(__file__).parents[3]
PUBLIC = sorted((Path(__file__).parent / "configs").glob("*.json"))
"""Published configurations."""
TINY = ROOT / "models" / "tiny" / "config.json"


def parameters(config: dict[str, Any]) -> int:
    return sum(part.parameters for part in parts_of(parse_config(config, {}), 2))


@pytest.mark.parametrize("path", [TINY, *PUBLIC], ids=lambda path: path.stem)
def test_parameter_counts_equal_transformers(path: Path) -> None:
    config = json.loads(path.read_text())
    given = {key: value for key, value in config.items() if key != "quantization_config"}
    kind = transformers.AutoModelForImageTextToText if "vision_config" in given else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(**given))
    assert parameters(config) == sum(tensor.numel() for tensor in model.parameters())


KNOWN = {
    "Llama-3.1-8B": (8_030_261_248, 8_030_261_248, 131_072),
    "Llama-3.1-70B": (70_553_706_496, 70_553_706_496, 327_680),
    "Qwen3-0.6B": (596_049_920, 596_049_920, 114_688),
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704, 98_304),
    "Qwen2.5-VL-7B": (8_292_166_656, 8_292_166_656, 57_344),
    "Qwen3-VL-2B": (2_127_532_032, 2_127_532_032, 114_688),
    "gemma-3-4b-it": (4_300_079_472, 4_300_079_472, 139_264),
    "InternVL3_5-8B-HF": (8_528_318_464, 8_528_318_464, 147_456),
    "Mixtral-8x7B": (46_702_792_704, 12_879_925_248, 131_072),
}
"""Parameters, active ones with the embedding's, and bytes of a token's keys and values in 16 bits."""


@pytest.mark.parametrize("name", KNOWN)
def test_parameter_counts_equal_the_published_ones(name: str) -> None:
    model = parse_config(json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text()), {})
    parts = parts_of(model, 2)
    active = sum(part.active or part.parameters for part in parts)
    assert (sum(part.parameters for part in parts), active, bytes_per_token(model, 2)) == KNOWN[name]


class Counted(RandomWeights):
    """Counts the elements of the tensors taken."""

    taken = 0

    def take(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        tensor = super().take(name, *shape, **options)
        self.taken += tensor.numel()
        return tensor


def small(path: Path) -> dict[str, Any]:
    """Return the same architecture, small enough to build."""
    config = json.loads(path.read_text())
    is_tower = False
    if "vision_config" in config:
        config |= config.pop("text_config", {}) | {"model_type": config["model_type"]}
        config["vision_config"] |= {"hidden_size": 32, "intermediate_size": 48}
        is_tower = "image_size" in config["vision_config"]
        config["vision_config"] |= {"num_attention_heads": 2} if is_tower else {"num_heads": 2, "out_hidden_size": 64}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 120, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    rope = {"mrope_section": [2, 3, 3]} if "vision_config" in config and not is_tower else None
    config = config | {key: value for key, value in sizes.items() if key in config} | {"rope_scaling": rope}
    for key in ("layer_types", "experts_per_token"):
        config.pop(key, None)
    return config


@pytest.mark.parametrize("path", [TINY, *PUBLIC], ids=lambda path: path.stem)
def test_parameter_counts_equal_the_decoders(path: Path) -> None:
    config = small(path)
    model = parse_config(config, {})
    weights = Counted(0, torch.float32, torch.device("cpu"))
    _decoder(model)(model, weights, 32)
    assert weights.taken == parameters(config)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("path", [TINY, *PUBLIC], ids=lambda path: path.stem)
def test_the_bytes_of_a_rank_are_those_that_its_decoder_takes(path: Path, count: int) -> None:
    model = parse_config(small(path), {})
    for ep_size in (1, count) if model.moe is not None else (1,):
        expected = sum(part.bytes for part in parts_of(model, 4, rank=Rank(0, count), ep_size=ep_size))
        for index in range(count):
            rank = Rank(index, count)
            experts = rank if ep_size > 1 else WHOLE
            weights = Counted(0, torch.float32, torch.device("cpu"), rank=rank, experts=experts)
            _decoder(model)(model, weights, 32, SimpleNamespace(rank=rank))  # type: ignore[arg-type]
            assert weights.taken * 4 == expected


@pytest.mark.parametrize("path", [TINY, *PUBLIC], ids=lambda path: path.stem)
def test_the_bytes_of_each_stage_are_those_that_its_decoder_takes(path: Path) -> None:
    model = parse_config(small(path), {})
    for stage in range(model.num_layers):
        rank = Rank(0, 1, stage, model.num_layers)
        weights = Counted(0, torch.float32, torch.device("cpu"), rank=rank)
        _decoder(model)(model, weights, 32, SimpleNamespace(rank=rank))  # type: ignore[arg-type]
        assert weights.taken * 4 == sum(part.bytes for part in parts_of(model, 4, rank=rank))


def test_fp8_takes_a_byte_and_its_scales() -> None:
    model = read_config(TINY.parent)
    sizes = {part.name: part for part in parts_of(model, 2, ONLINE)}
    weights = RandomWeights(0, torch.bfloat16, torch.device("cpu"), ONLINE)
    names = {f"{name}_proj": size for name, size in (("q", 512), ("k", 128), ("v", 128))}
    assert isinstance(Decoder(model, weights, 32), Decoder)
    per_layer = sum(out * 256 + 4 * out for out in names.values()) + 256 * 512 + 4 * 256 + 2 * 2 * 64
    assert sizes["attention"].bytes == model.num_layers * per_layer
    assert sizes["embedding"].bytes == sizes["embedding"].parameters * 2
    blocks = {part.name: part for part in parts_of(model, 2, Scheme("blocks"))}
    assert blocks["feed-forward"].bytes == model.num_layers * 3 * (256 * 768 + 4 * 768 * 2)
