"""Models are refused by config.json and file sizes before torch is imported or a process starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.ports import free_base
from treeline_runtime.args import ServerArgs
from treeline_runtime.config import ConfigError, EngineConfig
from treeline_runtime.models import preflight
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.preflight import INDEX, Memory, check_before_loading, memory_of, weight_bytes

TINY = Path(__file__).parents[3] / "models" / "tiny"
GIB = 1 << 30


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The tiny model's small files, without weights."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def change(folder: Path, **settings: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def index(folder: Path, size: int) -> Path:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": {}}))
    return folder


def machine(monkeypatch: pytest.MonkeyPatch, gib: float, cuda: bool = False) -> None:
    memory = Memory(int(gib * GIB), "this GPU (H1)" if cuda else "this machine", cuda)
    monkeypatch.setattr(preflight, "memory_of", lambda _device: memory)


def test_the_size_of_weights_is_that_of_the_tensors_once_loaded(tmp_path: Path) -> None:
    tensors = load_file(TINY / "model.safetensors")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    for itemsize in (1, 2, 4):
        assert weight_bytes(TINY, itemsize) == numbers * itemsize
    first = next(iter(tensors.values()))
    packed = {"a": first.float(), "b": first.float().byte()}
    save_file(packed, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, 4) == first.numel() * 5, "what is quantised stays as it is"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_drafter_that_is_not_there_is_missed_before_the_model_is_loaded(checkpoint: Path, algorithm: str) -> None:
    folder = str(checkpoint / "drafter")
    config = EngineConfig(model="m", speculative_algorithm=algorithm, speculative_draft_model_path=folder)
    with pytest.raises(ConfigError, match=f"--speculative-draft-model-path: .*{folder}"):
        check_before_loading(config, checkpoint)


def test_before_the_download_the_index_gives_the_size_of_weights(checkpoint: Path) -> None:
    assert weight_bytes(checkpoint, 4) is None
    index(change(checkpoint, torch_dtype="bfloat16"), 10 * GIB)
    assert weight_bytes(checkpoint, 4) == 20 * GIB
    assert weight_bytes(checkpoint, 2) == 10 * GIB
    change(checkpoint, quantization_config={"quant_method": "fp8"})
    assert weight_bytes(checkpoint, 2) == 10 * GIB


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{}"])
def test_broken_files_are_left_to_the_loader(checkpoint: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0.001)
    (checkpoint / "model.safetensors").write_bytes(content)
    (checkpoint / INDEX).write_bytes(content)
    check_before_loading(EngineConfig(model="m"), checkpoint)


@pytest.mark.parametrize(
    ("settings", "gib", "cuda", "copies", "said"),
    [
        ({}, 39, False, 1, "the weights of m take 40.0 GiB as float32, and this machine has 39.0 GiB: take --dtype"),
        ({"dtype": "bfloat16"}, 19, False, 1, "take 20.0 GiB as bfloat16, and this machine has 19.0 GiB: take an fp8"),
        ({}, 19, True, 1, "take 20.0 GiB as bfloat16, and this GPU (H1) has 19.0 GiB: take an fp8"),
        ({"quantization": "fp8"}, 9, True, 1, "take 10.0 GiB as fp8, and this GPU (H1) has 9.0 GiB: take a smaller"),
        ({}, 79, False, 2, "2 engines need 2 times that: start fewer (--replicas), or take"),
        (
            {},
            19,
            True,
            1,
            "a smaller model or more memory, or split it over more GPUs (--tp-size, --pp-size) (`treeline size m`",
        ),
        (
            {"tp_size": 2},
            9,
            True,
            1,
            "take 20.0 GiB as bfloat16, 10.0 GiB on each of 2 GPUs, and this GPU (H1) has 9.0 GiB: take",
        ),
        ({"tp_size": 2}, 39, False, 1, "take 40.0 GiB as float32, and this machine has 39.0 GiB"),
        ({"tp_size": 2}, 10, True, 1, None),
        ({"pp_size": 2}, 9, True, 1, "10.0 GiB on each of 2 GPUs, and this GPU (H1) has 9.0 GiB: take"),
        ({"pp_size": 2}, 10, True, 1, None),
        ({"tp_size": 2}, 40, False, 1, None),
        ({}, 40, False, 1, None),
        ({}, 20, True, 1, None),
        ({"quantization": "fp8"}, 10, True, 1, None),
        ({"load_format": "dummy"}, 1, True, 9, None),
    ],
)
def test_weights_that_cannot_fit_are_refused_with_both_sizes(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    gib: float,
    cuda: bool,
    copies: int,
    said: str | None,
) -> None:
    machine(monkeypatch, gib, cuda)
    index(change(checkpoint, torch_dtype="bfloat16"), 20 * GIB)
    config = EngineConfig(model="m", **settings)
    if said is None:
        check_before_loading(config, checkpoint, copies)
        return
    with pytest.raises(ConfigError) as refused:
        check_before_loading(config, checkpoint, copies)
    assert said in str(refused.value)


def test_data_parallel_ranks_share_the_memory_of_a_machine_but_not_of_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(change(checkpoint, torch_dtype="bfloat16"), 20 * GIB)
    config = EngineConfig(model="m", dtype="bfloat16")
    machine(monkeypatch, 79)
    check_before_loading(config, checkpoint, 1, 3)
    with pytest.raises(ConfigError, match=r"4 engines need 4 times that: start fewer \(--dp-size\), or take"):
        check_before_loading(config, checkpoint, 1, 4)
    with pytest.raises(
        ConfigError, match=r"4 engines need 4 times that: start fewer \(--replicas or --dp-size\), or take"
    ):
        check_before_loading(config, checkpoint, 2, 2)
    machine(monkeypatch, 20, True)
    check_before_loading(config, checkpoint, 1, 4)


def test_engines_that_share_experts_have_at_least_an_equal_part_of_the_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    change(checkpoint, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", torch_dtype="bfloat16", **experts)
    index(checkpoint, 20 * GIB)
    args = ServerArgs(model="m", dtype="bfloat16", dp_size=2, ep_size=2)
    machine(monkeypatch, 20)
    check_before_loading(args, checkpoint, 1, 2)
    machine(monkeypatch, 10, True)
    check_before_loading(args, checkpoint, 1, 2)
    machine(monkeypatch, 9, True)
    with pytest.raises(ConfigError, match=r"10.0 GiB on each of 2 GPUs"):
        check_before_loading(args, checkpoint, 1, 2)


@pytest.mark.parametrize(
    ("changed", "settings", "error", "said"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            {},
            ModelError,
            "architecture MambaForCausalLM is not supported; sup",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, {}, ModelError, "awq"),
        ({}, {"tp_size": 3}, ModelError, "Qwen3ForCausalLM has 8 attention heads, which --tp-size 3 does not divide"),
        ({}, {"context_length": 10**6}, ConfigError, "context_length 1000000 exceeds the model's 8192 positions: set"),
    ],
)
def test_unsupported_models_are_refused(
    checkpoint: Path, changed: Any, settings: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as refused:
        check_before_loading(EngineConfig(model="m", **settings), change(checkpoint, **changed))
    assert said in str(refused.value)


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "_torch_is_for_cpus", lambda: False)


def test_the_largest_gpu_counts_and_none_where_cuda_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, "echo '24576, NVIDIA L4'; echo '81920, NVIDIA H100, 80GB'", monkeypatch)
    assert memory_of("auto") == memory_of("cuda:1") == Memory(80 * GIB, "this GPU (NVIDIA H100, 80GB)", cuda=True)
    cpu = memory_of("cpu")
    assert cpu is not None
    assert not cpu.cuda
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert memory_of("auto") == cpu
    assert memory_of("cuda") is None


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'"])
def test_an_unreadable_gpu_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    nvidia_smi(tmp_path, script, monkeypatch)
    assert memory_of("auto") is None


@pytest.mark.integration
def test_serve_and_up_refuse_before_torch_is_loaded_or_a_process_started(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").touch()
    change(checkpoint, architectures=["MambaForCausalLM"])
    program = (
        "import sys; from treeline.main import main; status = main(sys.argv[1:]);"
        "sys.exit(status if 'torch' not in sys.modules else 99)"
    )
    ports = ["--port", "0", "--metrics-port", "off", "--admin-port", "off", "--no-events"]
    for words in (["serve", str(checkpoint), *ports], ["up", str(checkpoint), "--port-base", str(free_base(17))]):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=240)
        assert done.returncode == 1, done.stderr
        assert "architecture MambaForCausalLM is not supported; supported: " in done.stderr
        assert "starting" not in done.stderr
