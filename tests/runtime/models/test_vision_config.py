"""Configurations of models that read images: wrapped and flat ones are read, what is not known is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from treeline_runtime.models.config import parse_config
from treeline_runtime.models.settings import ModelError
from treeline_runtime.models.shards import check_ranks

CONFIGS = Path(__file__).parent / "configs"
QWEN2_5, QWEN3, QWEN3_MOE = "Qwen2.5-VL-7B", "Qwen3-VL-2B", "Qwen3-VL-30B-A3B"
VALUES = (None, True, -1, 0, 1, 7, 2.5, float("inf"), 10**15, "x", [], {}, [1], [1, 2, 3], ["x", None], {"a": 1})


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def changed(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a published configuration with keys changed; `encoder.` and `text.` name those of the parts."""
    config = config_of(name)
    text = config.get("text_config", config)
    for key, value in changes.items():
        part, _, inner = key.rpartition(".")
        {"": config, "encoder": config["vision_config"], "text": text}[part][inner] = value
    return config


def test_flat_and_wrapped_settings_mean_the_same() -> None:
    flat = config_of(QWEN2_5)
    outer = {key: flat.pop(key) for key in ("architectures", "model_type", "vision_config")}
    wrapped = outer | {"text_config": flat | {"model_type": "qwen2_5_vl_text"}}
    assert parse_config(wrapped, {}) == parse_config(config_of(QWEN2_5), {})


def test_settings_of_transformers_5_mean_the_same() -> None:
    for name, rope in ((QWEN2_5, {"mrope_section": [16, 24, 24]}), (QWEN3, {"mrope_section": [24, 20, 20]})):
        new = config_of(name)
        text = new.get("text_config", new)
        old_theta = text.pop("rope_theta")
        del text["rope_scaling"]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": old_theta, **rope}
        new["vision_config"] |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
        assert parse_config(new, {}) == parse_config(config_of(name), {})


@pytest.mark.parametrize("where", [("tie_word_embeddings",), ("text.tie_word_embeddings",)])
def test_tied_embeddings_may_be_told_in_either_place(where: tuple[str, ...]) -> None:
    off = {"tie_word_embeddings": False, "text.tie_word_embeddings": False}
    assert parse_config(changed(QWEN3, off | dict.fromkeys(where, True)), {}).tie_word_embeddings
    assert not parse_config(changed(QWEN3, off), {}).tie_word_embeddings


def test_frequencies_turn_in_blocks_or_in_turns() -> None:
    blocks, turns = (parse_config(config_of(name), {}).mrope for name in (QWEN2_5, QWEN3))
    assert blocks is not None
    assert turns is not None
    assert blocks.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert turns.axes == (0, 1, 2) * 20 + (0,) * 4
    assert (blocks.frame_step, turns.frame_step) == (2, 1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (QWEN3, {"vision_config": None}, "vision_config must be an object"),
        (QWEN3, {"text_config": 3}, "text_config must be an object"),
        (QWEN3, {"encoder.temporal_window": 3}, "vision_config has settings that are not known here: temporal_window"),
        (QWEN3, {"text.logit_scale": 2.0}, "logit_scale = 2.0"),
        (QWEN3, {"encoder.hidden_act": "gelu"}, "activation 'gelu' of vision_config"),
        (QWEN3, {"encoder.hidden_size": 1000}, "four times a multiple of num_heads"),
        (QWEN3, {"encoder.out_hidden_size": 4096}, "out_hidden_size must be the decoder's hidden_size, 2048"),
        (QWEN3, {"encoder.num_position_embeddings": 2000}, "must be a square, not 2000"),
        (QWEN3, {"encoder.deepstack_visual_indexes": [5, 24]}, "layers' numbers below 24, in order"),
        (QWEN3, {"encoder.deepstack_visual_indexes": [9, 5]}, "layers' numbers below 24, in order"),
        (QWEN3, {"text.num_hidden_layers": 2}, "more than the 2 layers"),
        (QWEN3, {"encoder.patch_size": [16, 16]}, "patch_size must be a whole number"),
        (QWEN3, {"text.rope_scaling": {"mrope_section": [24, 20, 21]}}, "must add up to half of head_dim 128"),
        (QWEN3, {"text.rope_scaling": {"mrope_section": [64]}}, "must be three whole numbers"),
        (QWEN3, {"text.rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved must be true"),
        (QWEN2_5, {"rope_scaling": {"mrope_interleaved": True}}, "mrope_interleaved must be false"),
        (QWEN3_MOE, {"text.norm_topk_prob": False}, "norm_topk_prob = False"),
        (QWEN2_5, {"encoder.window_size": 20}, "less than a token's side"),
        (QWEN2_5, {"model_type": "qwen2_vl"}, "which is it"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(changed(name, changes), {})


@pytest.mark.parametrize("name", [QWEN2_5, QWEN3])
def test_any_value_of_an_encoders_key_is_read_or_refused_with_a_message(name: str) -> None:
    keys = [*(f"encoder.{key}" for key in config_of(name)["vision_config"]), "encoder.rope_parameters", "text_config"]
    for key in keys:
        for value in VALUES:
            with contextlib.suppress(ModelError):
                parse_config(changed(name, {key: value}), {})


@pytest.mark.parametrize("name", [QWEN2_5, QWEN3, QWEN3_MOE])
def test_several_ranks_are_refused(name: str) -> None:
    model = parse_config(config_of(name), {})
    check_ranks(model, 1)
    for ranks in ((2, 1), (1, 2), (1, 1, 2)):
        with pytest.raises(ModelError, match="not supported on several ranks"):
            check_ranks(model, *ranks)
