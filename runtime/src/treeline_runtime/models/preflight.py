"""Refuses a model before loading it, from config.json and the sizes of files alone. No torch here.

The memory of weights is estimated from below, so that no model is refused that would have worked; other shortages
are found while loading.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from treeline_runtime.config import ConfigError, EngineConfig
from treeline_runtime.memory import draft_bytes_per_token, resolve_context_length
from treeline_runtime.models.config import ModelConfig, ModelError, read_config
from treeline_runtime.models.pooling import pooling_of
from treeline_runtime.models.shards import check_ranks

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of elements that are converted to the engine's dtype."""
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONFIG_TYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_MOST_HEADER_BYTES = 100 << 20
"""safetensors' own bound."""
_NVIDIA_SMI_S = 20.0
_GIB = 1 << 30


class Memory(NamedTuple):
    """The memory that weights have to fit into."""

    size: int
    """Bytes, used ones included."""
    name: str
    cuda: bool


def check_before_loading(config: EngineConfig, directory: Path, copies: int = 1, dp_size: int = 1) -> None:
    """`copies`: how many runtimes with this configuration share the machine, each with `dp_size` engines. Weights need
    not be there yet: then the index beside config.json says their size. Raises ModelError or ConfigError.
    """
    model = read_config(directory)
    pooling_of(directory, config.task, matryoshka=config.matryoshka)
    resolve_context_length(config, model)
    check_quantization(config, model)
    check_ranks(model, config.tp_size, config.pp_size, config.ep_size)
    try:
        draft_bytes_per_token(config, model, 1)  # reads the drafter's config.json
    except ModelError as error:
        raise ConfigError(f"--speculative-draft-model-path: {error}") from None
    if config.load_format != "dummy" and (memory := memory_of(config.device)) is not None:
        each = 1 if memory.cuda or config.ep_size > config.tp_size else dp_size
        _check_fit(config, directory, memory, {"--replicas": copies, "--dp-size": each})


def check_quantization(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ModelError where weights of this model are not quantised as they are loaded."""
    if config.quantization == "fp8" and model.moe is not None:
        raise ModelError(
            f"--quantization fp8 is not supported for {model.architecture}, which has experts: leave the flag out"
        )


def _check_fit(config: EngineConfig, directory: Path, memory: Memory, counts: dict[str, int]) -> None:
    """`counts`: the engines that share the memory are the product of these, by flag."""
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if memory.cuda else "float32"
    itemsize = 1 if config.quantization == "fp8" else _ITEMSIZES[dtype]
    # on a CPU the ranks of a machine share its memory; of engines that share experts, each has all other weights
    ranks = max(config.ranks, config.ep_size) if memory.cuda else config.nnodes
    whole = weight_bytes(directory, itemsize)
    engines = math.prod(counts.values())
    if whole is None or (each := whole / ranks) * engines <= memory.size:
        return
    flags = " or ".join(flag for flag, count in counts.items() if count > 1)
    many = f"{engines} engines need {engines} times that: start fewer ({flags}), or " if each <= memory.size else ""
    smaller = "" if itemsize == 1 else "an fp8 checkpoint, " if itemsize == 2 else "--dtype bfloat16, "
    more = "more memory, or split it over more GPUs (--tp-size, --pp-size)" if memory.cuda else "more memory"
    part = f", {each / _GIB:.1f} GiB on each of {ranks} {'GPUs' if memory.cuda else 'machines'}" if ranks > 1 else ""
    raise ConfigError(
        f"the weights of {config.model} take {whole / _GIB:.1f} GiB as {'fp8' if itemsize == 1 else dtype}{part}, and "
        f"{memory.name} has {memory.size / _GIB:.1f} GiB: {many}take {smaller}a smaller model or {more} "
        f"(`treeline size {config.model}` says what it needs)"
    )


def weight_bytes(directory: Path, itemsize: int) -> int | None:
    """Bytes that the weights take at least, if floating-point elements have this size; None if the files do not say."""
    files = sorted(directory.glob("*.safetensors"))
    try:
        if files:
            return sum(_loaded_bytes(file, itemsize) for file in files)
        total = int(json.loads((directory / INDEX).read_bytes())["metadata"]["total_size"])
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # the loader reports the error
    stored = _CONFIG_TYPES.get(str(config.get("torch_dtype") or config.get("dtype")))
    if config.get("quantization_config") or stored is None:
        return total if itemsize > 1 else None
    return total * itemsize // stored


def _loaded_bytes(file: Path, itemsize: int) -> int:
    """Bytes of a file's tensors once loaded: floating-point elements have `itemsize` bytes then."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{file} has no header")
        header = json.loads(opened.read(length))
    tensors = [told for name, told in header.items() if name != "__metadata__"]
    return sum(
        math.prod(told["shape"]) * itemsize
        if told["dtype"] in _FLOATS
        else told["data_offsets"][1] - told["data_offsets"][0]
        for told in tensors
    )


def memory_of(device: str) -> Memory | None:
    """The memory of the device that a runtime will take; None if it cannot be found without torch."""
    gpus = _gpus() if device == "auto" or device.startswith("cuda") else []
    if gpus is None:
        return None
    if gpus:
        return max(gpus)
    if device not in ("auto", "cpu"):
        return None
    return Memory(_machine_bytes(), "this machine", cuda=False)


def _gpus() -> list[Memory] | None:
    """The GPUs of this machine; None where there may be some that nothing here tells about."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") or _torch_is_for_cpus():
        return []
    program = shutil.which("nvidia-smi")
    if program is None:
        hidden = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
        return None if any(Path(name).exists() for name in hidden) else []
    query = [program, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
        rows = [line.partition(",") for line in told.splitlines()]
        return [Memory(int(size) << 20, f"this GPU ({name.strip()})", cuda=True) for size, _, name in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _torch_is_for_cpus() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _machine_bytes() -> int:
    """Memory of the machine, or of this process's control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # none, or "max"
        return total
