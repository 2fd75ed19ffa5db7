"""Real-world checkpoints are served as transformers serves them, or refused by name, never anything in between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runtime_engine import write_config
from support.runtime_models import IDS, Runner, edit, ours, reference, save, theirs_of
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.memory import bytes_per_token
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.quantization import product
from treeline_runtime.scheduler import resolve
from treeline_runtime.scheduler.resolve import num_pages
from treeline_runtime.server.sampling import SamplingDefaults

transformers = pytest.importorskip("transformers")


def assert_same(path: Path, **config: Any) -> None:
    np.testing.assert_allclose(Runner(ours(path, **config)).feed(IDS), theirs_of(path), rtol=1e-4, atol=2e-4)


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("Llama", {}), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llama(llama_path: Path, tmp_path: Path) -> Path:
    """Return a copy of a small checkpoint, to be damaged."""
    return Path(shutil.copytree(llama_path, tmp_path / "llama"))


def rewrite(path: Path, **changes: torch.Tensor) -> Path:
    save_file(load_file(path / "model.safetensors") | changes, path / "model.safetensors")
    return path


# ---- config.json: rope, ties, defaults --------------------------------------------------------------------

LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": LINEAR, "rope_theta": 700.0},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": LINEAR | {"rope_theta": 900.0}},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": LLAMA3, "rope_theta": 700.0},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_scaling": None, "rope_theta": 700.0},
        {"rope_parameters": None, "rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        {"rope_parameters": ..., "rope_theta": 700.0},
        {"rope_parameters": ...},
    ],
    ids=str,
)
def test_rope_settings_in_two_places_mean_the_same_as_in_transformers(llama: Path, changes: dict[str, Any]) -> None:
    assert_same(edit(llama, **changes))


def test_a_head_that_differs_from_the_embedding_is_used_even_if_declared_tied(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_same(edit(llama, tie_word_embeddings=True))
    assert "has two that differ: both are used" in caplog.text


def test_a_head_that_equals_the_embedding_is_the_embedding(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(llama / "model.safetensors")
    rewrite(llama, **{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert_same(edit(llama, tie_word_embeddings=True))
    assert caplog.text == ""
    model = ours(llama)
    assert torch.equal(model._head.weight.to_dense(), model.embedding)
    monkeypatch.setattr(product, "SECOND_COPY_BYTES", 0)
    model = ours(llama)
    assert model._head.weight is model.embedding


def test_a_tied_checkpoint_may_have_the_head_alone(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    assert_same(edit(llama, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [("Llama", "num_key_value_heads"), ("Qwen3", "num_key_value_heads"), ("Llama", "eos_token_id")],
)
def test_a_missing_key_means_the_same_as_in_transformers(tmp_path: Path, architecture: str, missing: str) -> None:
    names = {"architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower()}
    path = edit(write_config(tmp_path, **names, hidden_size=64, num_attention_heads=64, head_dim=2), **{missing: ...})
    expected = transformers.AutoConfig.from_pretrained(path)
    config = read_config(path)
    assert config.num_kv_heads == expected.num_key_value_heads
    eos = expected.eos_token_id
    assert config.eos_token_ids == (() if eos is None else (eos,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"final_logit_softcapping": 30.0},
            r"may change the result: final_logit_softcapping = 30.0; if they",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256"),
        (
            {"attention_multiplier": 0.1, "logits_scaling": 8},
            r"attention_multiplier = 0.1, logits_scaling = 8",
        ),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"num_experts": 8}, "num_experts"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"use_mrope": True}, "use_mrope"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"a_key_of_tomorrow": False}, "a_key_of_tomorrow = False"),
        ({"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"]}, "1 entries for 2"),
        ({"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window must be a whole"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "'longrope' needs a short_factor"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "short_factor must be 4 numbers above 0",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope settings that are not supported",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [16, 24]}}, "mrope_section"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3' needs a low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "mistral"}, "architecture Qwen3ForCausalLM, but model_type 'mistral'"),
        ({"compression_config": {"format": "float-quantized"}}, "compression_config .* is not supported"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"quantization \(quant_method 'unknown'\) is not supported"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8' is not supported"),
        ({"attention_bias": "false"}, "attention_bias must be true or false, not 'false'"),
        ({"num_attention_heads": 5}, "5 attention heads cannot share 2 key/value heads"),
        ({"head_dim": 7}, "even head_dim, not 7"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1"),
        ({"num_attention_heads": 0}, "config.json"),
    ],
    ids=str,
)
def test_settings_that_change_the_computation_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write_config(tmp_path, **changes))


def test_settings_without_effect_are_accepted(tmp_path: Path) -> None:
    """Every key that transformers itself writes or accepts for them, in this version and as older ones did."""
    for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Olmo2", "Gemma2", "Gemma3"):
        config = getattr(transformers, f"{name.replace('Gemma3', 'Gemma3Text')}Config")().to_dict()
        config |= {"architectures": [f"{name}ForCausalLM"], "torch_dtype": "bfloat16", "pretraining_tp": 2}
        config |= {"some_key": None, "use_mrope": False, "max_window_layers": 28, "attention_dropout": 0.1}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path).architecture == f"{name}ForCausalLM"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "hf_quant_config.json",
            r"ModelOpt's quantised checkpoints are not supported \(hf_quant_config.json",
        ),
        ("quantize_config.json", "GPTQ's quantised checkpoints"),
        ("adapter_config.json", "merge the adapter into the model"),
    ],
)
def test_files_that_change_the_meaning_of_weights_are_refused_by_name(llama: Path, name: str, message: str) -> None:
    (llama / name).write_text("{}")
    with pytest.raises(ModelError, match=message):
        ours(llama)


# ---- tensors ----------------------------------------------------------------------------------------------

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_quantised_tensors_are_refused_whether_or_not_the_configuration_speaks_of_them(
    llama: Path, dtype: torch.dtype
) -> None:
    weight = load_file(llama / "model.safetensors")[Q_PROJ]
    rewrite(llama, **{Q_PROJ: weight.to(dtype)})
    with pytest.raises(ModelError, match=f"tensor {Q_PROJ} is {dtype}; quantised"):
        ours(llama)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.input_scale",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.mlp.gate_proj.lora_A.weight",
        "model.layers.2.input_layernorm.weight",
        "score.weight",
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(llama: Path, name: str) -> None:
    rewrite(llama, **{name: torch.ones(1)})
    with pytest.raises(ModelError, match=f"1 tensors that this model does not have, e.g. {name}"):
        ours(llama)


def test_rope_frequencies_of_old_checkpoints_are_left_alone(llama: Path) -> None:
    rewrite(llama, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_same(llama)


# ---- files ------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    path = save(reference("Llama", {}), tmp_path / "shards", max_shard_size="60KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def index_of(path: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((path / "model.safetensors.index.json").read_text())
    return index


def test_a_stale_index_beside_model_safetensors_is_not_read(llama: Path) -> None:
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(stale))
    save_file({"model.norm.weight": torch.zeros(64)}, llama / "model-00001-of-00001.safetensors")
    assert_same(llama)


def test_files_that_the_index_does_not_name_are_not_read(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"layers.0.weight": torch.zeros(3)}, shards / "consolidated.safetensors")
    assert_same(shards)
    assert "consolidated.safetensors and others like it are not read" in caplog.text


def test_files_without_an_index_are_refused(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="which of them belong to the model"):
        ours(shards)
    with pytest.raises(OSError, match="no file named"):
        theirs_of(shards)


def test_an_index_that_does_not_fit_its_files_is_refused(shards: Path) -> None:
    path = shards / "model.safetensors.index.json"
    index = index_of(shards)
    first, *_, last = sorted(index["weight_map"])
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][last])

    def refused(change: dict[str, str], without: str = "") -> str:
        names = {k: v for k, v in (index["weight_map"] | change).items() if k != without}
        path.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ModelError) as told:
            ours(shards)
        return str(told.value)

    assert f"tensor {last} is not in it" in refused({last: other})
    assert f"does not say that tensor {first} is there" in refused({}, without=first)
    assert "cannot read" in refused({"more.weight": "model-00099-of-00099.safetensors"})
    assert "which is not a file of the same directory" in refused({"more.weight": "../llama/model.safetensors"})


# ---- dynamic rope -----------------------------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def test_dynamic_rope_is_scaled_only_beyond_the_trained_length(
    tmp_path: Path,
) -> None:
    path = save(reference("Llama", {"max_position_embeddings": 32, "rope_parameters": DYNAMIC}), tmp_path)
    np.testing.assert_allclose(Runner(ours(path)).feed(IDS[:32]), theirs_of(path, IDS[:32]), rtol=1e-4, atol=2e-4)
    # transformers computes a prompt with the base of its own length: the same, where that is the longest served
    long = Runner(ours(path, context_length=len(IDS)))
    expected = theirs_of(path)
    np.testing.assert_allclose(long.feed(IDS), expected, rtol=1e-4, atol=2e-4)
    pieces = Runner(ours(path, context_length=len(IDS)))
    parts = [pieces.feed(IDS[:20]), *(pieces.feed([token]) for token in IDS[20:40]), pieces.feed(IDS[40:])]
    np.testing.assert_allclose(torch.cat(parts), expected, rtol=1e-4, atol=2e-4)


# ---- memory -----------------------------------------------------------------------------------------------


def pages(model: Path, **settings: Any) -> int:
    config = SchedulerConfig(model=str(model), **settings)
    return num_pages(config, bytes_per_token(read_config(model), 4), torch.device("cpu"))


def test_a_pool_larger_than_memory_is_refused_with_the_number_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path)
    size = bytes_per_token(read_config(path), 4)
    monkeypatch.setattr(resolve, "_available_memory", lambda: 1000 * size + 5)
    assert pages(path, max_total_tokens=1000) == 62
    with pytest.raises(ConfigError, match=rf"at most 992 tokens fit \({size} bytes each\)"):
        pages(path, max_total_tokens=1008)
    assert pages(path, max_total_tokens=992) == 62
    with pytest.raises(ConfigError, match=r"max_total_tokens 100000000 needs .* GiB of KV pool, but .* on cpu"):
        pages(path, max_total_tokens=100_000_000)


def test_file_pages_of_a_control_group_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert resolve._available_in_group(tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 300\nactive_file 150\ninactive_file 450\n")
    assert resolve._available_in_group(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert resolve._available_in_group(tmp_path) == sys.maxsize


@pytest.mark.deep
def test_the_server_says_in_one_line_that_the_pool_does_not_fit(llama: Path) -> None:
    code = (
        "import sys; from treeline_runtime import Engine\n"
        "try: Engine(model=sys.argv[1], max_total_tokens=10**12)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(llama)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert "tokens fit" in done.stdout
    assert done.stderr == ""


# ---- generation_config.json -------------------------------------------------------------------------------


def defaults(path: Path, **config: Any) -> SamplingDefaults:
    (path / "generation_config.json").write_text(json.dumps(config))
    return SamplingDefaults.from_model(path)


def test_generation_config_is_applied(tmp_path: Path) -> None:
    assert SamplingDefaults.from_model(tmp_path) == SamplingDefaults()
    assert defaults(tmp_path, temperature=0.6, top_k=0, min_p=0.1) == SamplingDefaults(temperature=0.6, min_p=0.1)
    assert defaults(tmp_path, do_sample=False, temperature=0.6).temperature == 0.0
    assert defaults(tmp_path, do_sample=True) == SamplingDefaults()


def test_every_setting_that_transformers_writes_by_default_is_known(tmp_path: Path) -> None:
    everything = (
        transformers.GenerationConfig().to_dict()
        | transformers.GenerationConfig(**transformers.GenerationConfig._get_default_generation_params()).to_dict()
        | {"bos_token_id": 1, "pad_token_id": 0, "transformers_version": "4.51.0"}
    )
    defaults(tmp_path, **everything)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"num_beams": 4},
            "settings that are not supported: num_beams = 4; correct it, or leave it out with --sam",
        ),
        ({"suppress_tokens": [1, 2]}, r"suppress_tokens = \[1, 2\]"),
        ({"bad_words_ids": [[5]]}, "bad_words_ids"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3"),
        ({"typical_p": 0.9}, "typical_p = 0.9"),
        ({"forced_bos_token_id": 7}, "forced_bos_token_id = 7"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow = 1"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
    ],
    ids=str,
)
def test_unsupported_generation_settings_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        defaults(tmp_path, **config)
