"""Reads LoRA adapters as peft saves them: adapter_config.json and adapter_model.safetensors.

An adapter adds B A x to what some projections make of x. What else an adapter may be (DoRA, aLoRA, …) would change the
answers silently if it were left out, so it is refused by name. The identity of an adapter is the digest of its files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from treeline_runtime.models.settings import ModelError, words
from treeline_runtime.models.shards import OUTPUTS, Cut
from treeline_runtime.models.stream import cut_from
from treeline_runtime.models.weights import DTYPES, PREFIX

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 1 << 20
MOST_RANK, MOST_ALPHA = 1 << 16, 1e6
HEADER_BYTES = 16 << 20
"""Room for a header of safetensors, and a little more."""

_SCALE = words("r lora_alpha use_rslora rank_pattern alpha_pattern")
"""Settings on which the scale depends: with the weights, these are the identity."""
_READ = _SCALE | words("peft_type bias init_lora_weights target_modules")
_NO_EFFECT = words(
    "auto_mapping base_model_name_or_path exclude_modules fan_in_fan_out inference_mode layers_pattern "
    "layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision runtime_config task_type"
)
"""What else peft writes; the tensors themselves say which layers have one."""
_NAMES = {"use_dora": "DoRA", "alora_invocation_tokens": "aLoRA", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA"}
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the weights of the base model."""
_TENSOR = re.compile(r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:model\.)?(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")


Pair = tuple[torch.Tensor, torch.Tensor]
"""A (rank, inputs) and B (outputs, rank)."""


@dataclass(frozen=True, slots=True)
class Site:
    """Stacked projections of one input, to which adapters may add."""

    names: tuple[str, ...]
    """Of each, without the prefix `model.`."""
    outputs: tuple[int, ...]
    """Of each, of all ranks."""
    inputs: int
    """Of all ranks."""
    cuts: tuple[Cut | None, ...]
    """The rank's part of each (`Linear`); None: all of it."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def own_outputs(self) -> tuple[int, ...]:
        return tuple(self._own(at)[0] for at in range(len(self.names)))

    @property
    def own_inputs(self) -> int:
        return self._own(0)[1]

    def _own(self, at: int) -> tuple[int, ...]:
        whole, cut = (self.outputs[at], self.inputs), self.cuts[at]
        return whole if cut is None else cut.shape(whole)

    def elements(self, rank: int) -> int:
        """Numbers of an adapter of that rank here, without a cut."""
        return rank * (self.inputs * len(self.names) + sum(self.outputs))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter, or a rank's part of it, on the host."""

    digest: str
    rank: int
    """The largest of its projections; 0: it has none here, but in another stage."""
    parts: Mapping[str, Pair] = field(repr=False)
    """Name of a site → A (rank, projections, inputs) and B times the scale (rank, outputs of all projections), with
    zeros for projections that it leaves alone."""

    @property
    def num_bytes(self) -> int:
        """Of host memory; torch's allocator of pinned memory takes powers of two."""
        tensors = [tensor for pair in self.parts.values() for tensor in pair]
        sizes = (tensor.untyped_storage().nbytes() for tensor in tensors)
        return sum(1 << (size - 1).bit_length() if tensors[0].is_pinned() else size for size in sizes)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What matters of adapter_config.json."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, Any]
    """Module → its rank, where it has another one; likewise alphas."""
    alphas: Mapping[str, Any]
    targets: tuple[str, ...]
    """() if they are a pattern."""

    def rank_of(self, module: str) -> int:
        return _whole(_of(self.ranks, module, self.rank), "rank_pattern")

    def scale_of(self, module: str) -> float:
        alpha, rank = _number(_of(self.alphas, module, self.alpha), "alpha_pattern"), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def find_adapter(path: str, root: str) -> Path:
    """The folder `path`, below `root` or relative to it. Raises ModelError if it, or a file that would be read, is
    elsewhere once links are followed."""
    allowed = Path(root).resolve()
    try:
        folder = (allowed / path).resolve()
        within = all((folder / name).resolve().is_relative_to(allowed) for name in ("", CONFIG, WEIGHTS))
    except (OSError, ValueError, RuntimeError):  # a NUL, a name that is too long, a circle of links
        within = False
    if not within:
        raise ModelError(f"{path!r} is not a folder below the one from which adapters may be loaded (--lora-root)")
    return folder


def read_adapter(
    folder: Path, sites: Sequence[Site], num_layers: int, max_rank: int, dtype: torch.dtype, *, pin: bool = False
) -> Adapter:
    """sites: of the rank's own layers; num_layers: of the model. pin: the device will read it without waiting. Raises
    ModelError."""
    config = _object(folder / CONFIG)
    settings = _settings(config, max_rank)
    own = {found[0] for site in sites for name in site.names if (found := _LAYER.match(name))}
    elements = sum(site.elements(max_rank) for site in sites) * -(-num_layers // max(len(own), 1))
    data = _bytes(folder / WEIGHTS, 4 * elements + HEADER_BYTES)
    pairs = _pairs(data)
    places = {name: (site, at) for site in sites for at, name in enumerate(site.names)}
    parts = dict[str, dict[int, Pair]]()
    for module, pair in pairs.items():
        if module in places:
            site, at = places[module]
            parts.setdefault(site.name, {})[at] = _part(module, pair, site, at, settings, max_rank, dtype)
        elif (layer := _LAYER.match(module)) is None or layer[0] in own or int(layer[1]) >= num_layers:
            raise ModelError(f"the adapter changes {module}: only attention and dense feed-forward layers are served")
    for target in settings.targets:
        if not any(_is(module, target) for module in pairs):
            raise ModelError(f"{CONFIG} names {target!r} in target_modules, of which {WEIGHTS} has nothing")
    digest = hashlib.sha256(json.dumps([config.get(key) for key in sorted(_SCALE)], sort_keys=True).encode())
    digest.update(data)
    ranks = (a.shape[0] for there in parts.values() for a, _ in there.values())
    joined = {site.name: _joined(site, parts[site.name], pin=pin) for site in sites if site.name in parts}
    return Adapter(digest.hexdigest(), max(ranks, default=0), joined)


def _joined(site: Site, parts: Mapping[int, Pair], *, pin: bool) -> Pair:
    """One matrix A and one B for a site, which a device takes in one copy each."""
    rank, any_a = max(len(a) for a, _ in parts.values()), next(iter(parts.values()))[0]
    joined_a = any_a.new_zeros((rank, len(site.names), site.own_inputs), pin_memory=pin)
    joined_b = any_a.new_zeros((rank, sum(site.own_outputs)), pin_memory=pin)
    places = joined_b.split(site.own_outputs, 1)
    for at, (a, b) in parts.items():
        joined_a[: len(a), at] = a
        places[at][: len(a)] = b.t()
    return joined_a, joined_b


def _part(module: str, pair: Pair, site: Site, at: int, settings: _Settings, max_rank: int, dtype: torch.dtype) -> Pair:
    """The rank's part of a module's A and of B times the scale. Raises ModelError."""
    (a, b), rank, inputs, outputs = pair, settings.rank_of(module), site.inputs, site.outputs[at]
    if (tuple(a.shape), tuple(b.shape)) != ((rank, inputs), (outputs, rank)):
        raise ModelError(
            f"the adapter's {module} has shapes {tuple(a.shape)} and {tuple(b.shape)}; its rank and the base model "
            f"ask for ({rank}, {inputs}) and ({outputs}, {rank})"
        )
    if rank > max_rank:
        raise ModelError(_too_high(rank, max_rank))
    if cut := site.cuts[at]:
        a, b = (a, cut_from(b, cut)) if cut.dim == OUTPUTS else (cut_from(a, cut), b)
    a, b = a.to(dtype), (b.float() * settings.scale_of(module)).to(dtype)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ModelError(f"the adapter's {module} has numbers that are not finite, or not in {dtype}")
    return a, b


def _settings(config: Mapping[str, Any], max_rank: int) -> _Settings:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{CONFIG}: peft_type {config.get('peft_type')!r} is not supported; supported: 'LORA'")
    for key, value in config.items():
        if value and key not in _READ and key not in _NO_EFFECT:
            raise ModelError(f"{CONFIG}: {_NAMES.get(key, key)} is not supported ({key}: {json.dumps(value)[:80]})")
    if config.get("bias") not in (None, "none"):
        raise ModelError(f"{CONFIG}: bias {config['bias']!r} is not supported: train with bias 'none'")
    if str(config.get("init_lora_weights")).lower().startswith(_OTHER_BASES):
        raise ModelError(
            f"{CONFIG}: init_lora_weights {config['init_lora_weights']!r} has changed the base model, too: convert the "
            "adapter (path_initial_model_for_weight_conversion of peft's save_pretrained)"
        )
    rank = _whole(config.get("r"), "r")
    if rank > max_rank:
        raise ModelError(_too_high(rank, max_rank))
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    for pattern in (ranks, alphas):
        if not isinstance(pattern, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in pattern):
            raise ModelError(f"{CONFIG}: rank_pattern and alpha_pattern may name modules, and not be other patterns")
    targets = config.get("target_modules")
    listed = tuple(dict.fromkeys(map(str, targets))) if isinstance(targets, list) else ()
    alpha = _number(config.get("lora_alpha"), "lora_alpha")
    return _Settings(rank, alpha, bool(config.get("use_rslora")), ranks, alphas, listed)


def _too_high(rank: int, max_rank: int) -> str:
    return (
        f"the adapter has rank {rank}, and the server keeps room for {max_rank}: start it with --max-lora-rank {rank}"
    )


def _whole(value: object, key: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_RANK:
        raise ModelError(f"{CONFIG}: {key} is not a whole number from 1 to {MOST_RANK}")
    return value


def _number(value: object, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MOST_ALPHA:
        raise ModelError(f"{CONFIG}: {key} is not a number up to {MOST_ALPHA:.0f}")
    return float(value)


def _is(module: str, name: str) -> bool:
    """Whether peft means this module by a name: at its end, from a dot on."""
    return module == name or module.endswith(f".{name}")


def _of(pattern: Mapping[str, Any], module: str, otherwise: float) -> Any:
    return next((value for name, value in pattern.items() if _is(module, name)), otherwise)


def _pairs(data: bytes) -> dict[str, Pair]:
    """The content of the weights' file: module → A and B. Raises ModelError."""
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{WEIGHTS} is no whole file of safetensors: {error}") from None
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (parts := _TENSOR.fullmatch(name)) is None:
            raise ModelError(f"the adapter's tensor {name} is not of a LoRA of a linear layer")
        if tensor.dtype not in DTYPES:
            raise ModelError(f"the adapter's tensor {name} is {tensor.dtype}, not floating-point")
        found.setdefault(parts[1], {})[parts[2]] = tensor
    if not found:
        raise ModelError(f"{WEIGHTS} has no tensors")
    for module, both in found.items():
        if len(both) < 2:
            raise ModelError(f"the adapter's {module} has one matrix without the other ({', '.join(both)})")
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_bytes(path, MOST_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found


def _bytes(path: Path, most: int) -> bytes:
    """Read once, so that what is checked and hashed is what is used. Opening a pipe does not wait for its writer."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileNotFoundError
            data = file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        text = f"{path} is not a file: an adapter has {CONFIG} and {WEIGHTS}, as peft saves them"
        raise ModelError(text) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if len(data) > most:
        raise ModelError(f"{path} has more than {most} bytes, the most that an adapter of this model can have here")
    return data


def site_of(prefix: str, outputs: Mapping[str, tuple[int, ...]], inputs: int, cuts: Sequence[Cut | None]) -> Site:
    """Of a stack of projections: see `Linear`."""
    names = tuple(prefix.removeprefix(PREFIX) + name for name in outputs)
    return Site(names, tuple(map(sum, outputs.values())), inputs, tuple(cuts))
