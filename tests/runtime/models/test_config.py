"""config.json: both generations of keys, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runtime_engine import TINY_CONFIG, write_config
from support.runtime_models import reference, save
from treeline_runtime.config import ConfigError, EngineConfig, SchedulerConfig
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.loader import load_model, resolve_device, resolve_dtype
from treeline_runtime.models.pooling import pooling_of


def test_several_eos_ids_come_from_generation_config(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=5)
    assert read_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_config(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("eos", ["x", {"a": 1}, [None], [[1]]], ids=str)
def test_invalid_eos_ids_are_refused_in_every_file(tmp_path: Path, eos: Any) -> None:
    write_config(tmp_path, eos_token_id=eos)
    with pytest.raises(ModelError):
        read_config(tmp_path)
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError):
        read_config(tmp_path)


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "MixtralForCausalLM", "LlamaForCausalLM"])
def test_a_model_of_more_layers_than_memory_could_list_is_refused(tmp_path: Path, architecture: str) -> None:
    experts = {"num_local_experts": 2} if architecture.startswith("Mixtral") else {}
    activation = {"query_pre_attn_scalar": 8} if architecture.startswith("Gemma") else {}
    known = {"architectures": [architecture], "model_type": None, "num_hidden_layers": 1 << 70}
    write_config(tmp_path, **known, **experts, **activation)
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read_config(tmp_path)


def test_files_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    for read in (read_config, pooling_of):
        with pytest.raises(ModelError, match="cannot read"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; supported: Llama",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method = 'awq' is not supported: take the unquantised checkpoint",
        ),
        ({"architectures": ["Llama5ForCausalLM"], "model_type": "llama5_text"}, "architecture Llama5ForCausalLM"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"hidden_size": "many"}, "config.json: invalid literal"),
    ],
)
def test_unsupported_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write_config(tmp_path, **changes))


def test_missing_files_and_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        read_config(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"config.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        read_config(tmp_path)
    config = dict(TINY_CONFIG)
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        read_config(tmp_path)


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    path = save(reference("Llama", {}), tmp_path)
    good = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    config = EngineConfig(model=str(path), device="cpu")
    with pytest.raises(ModelError, match=r"has no \*.safetensors"):
        load_model(config)
    (path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match="cannot read"):
        load_model(config)

    save_file(good | {"extra.weight": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors that this model does not have, e\.g\. extra\.weight"):
        load_model(config)
    save_file(good, path / "model.safetensors")
    load_model(config)

    missing = {k: v for k, v in good.items() if not k.endswith("layers.1.mlp.up_proj.weight")}
    save_file(missing, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing"):
        load_model(config)

    save_file(good | {"model.norm.weight": torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(3,\), config.json asks for \(64,\)"):
        load_model(config)

    save_file(good | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int8; quantised"):
        load_model(config)

    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        load_model(config)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": "other.safetensors"}})
    )
    with pytest.raises(ModelError, match=r"cannot read .*other.safetensors"):
        load_model(config)


def test_context_length_is_bounded_by_what_the_rope_scaling_makes_usable(tmp_path: Path) -> None:
    path = write_config(tmp_path / "plain")
    with pytest.raises(ConfigError, match="context_length 513 exceeds the model's 512"):
        load_model(EngineConfig(model=str(path), context_length=513, load_format="dummy"))
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    path = write_config(tmp_path / "yarn", rope_parameters=rope)
    load_model(EngineConfig(model=str(path), context_length=2048, load_format="dummy"))
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert read_config(write_config(tmp_path / "linear", rope_parameters=rope)).longest_context == 1024


def test_yarn_without_a_factor_takes_the_ratio_of_lengths(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    config = read_config(write_config(tmp_path, rope_parameters=rope))
    assert config.rope.factor == 4.0
    load_model(EngineConfig(model=str(tmp_path), load_format="dummy"))


def test_settings_that_cannot_work_are_refused() -> None:
    for name, value in [
        ("page_size", 0),
        ("mem_fraction", 1.5),
        ("context_length", 0),
        ("max_total_tokens", -1),
        ("max_running_requests", 0),
        ("max_queued_requests", -1),
        ("schedule_conservativeness", -1.0),
        ("overlap_depth", 2),
    ]:
        with pytest.raises(ConfigError, match=name):
            SchedulerConfig(model="x", **{name: value})  # type: ignore[arg-type]


def test_devices_and_dtypes_by_name() -> None:
    cpu = resolve_device("cpu")
    assert resolve_dtype("auto", cpu) is torch.float32
    assert resolve_dtype("bfloat16", cpu) is torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(ConfigError, match="unknown dtype 'int4'"):
        resolve_dtype("int4", cpu)
    with pytest.raises(ConfigError, match="unknown device 'quantum'"):
        resolve_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            resolve_device("cuda")
