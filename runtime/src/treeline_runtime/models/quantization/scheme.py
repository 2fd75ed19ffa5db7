"""Reads quantisation settings of config.json. No torch here.

Supported is fp8 (e4m3) for weights and inputs of projections, in two kinds of checkpoints:

- `quant_method` fp8: AutoFP8's, and those of DeepSeek and Qwen, which transformers calls fine-grained;
- `quant_method` compressed-tensors, format float-quantized: llm-compressor's.

A projection with a scale beside it is quantised and must be fp8; one without must be float. Lists of excluded modules
(`ignore` and others) are not needed.

Everything else is refused by name. AWQ and GPTQ need int4 kernels of a maintained library: AutoAWQ and AutoGPTQ have
ended, and GPTQModel and Marlin do not stand alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treeline_runtime.models.settings import words

BLOCK = 128
"""Outputs and inputs that share a scale in block-wise checkpoints."""
WHAT_TO_DO = (
    "take the unquantised checkpoint (--quantization fp8 quantises it at load), or an fp8 one (quant_method fp8, or "
    "compressed-tensors in format float-quantized)"
)
_FP8_KEYS = words(
    "activation_scheme dequantize expert_dtype fmt ignored_layers kv_cache_scheme modules_to_not_convert quant_method "
    "scale_fmt weight_block_size"
)
_COMPRESSED_KEYS = words(
    "config_groups format global_compression_ratio ignore kv_cache_scheme quant_method quantization_status "
    "sparsity_config transform_config version"
)
_GROUP_KEYS = words("format input_activations output_activations targets weights")
_TENSOR_KEYS = words(
    "actorder block_structure dynamic group_size num_bits scale_dtype strategy symmetric type zp_dtype "
    # how scales were chosen; has no effect
    "observer observer_kwargs"
)
_OTHER_KEYS = ("compression_config", "quantization", "quant_config")
"""Keys by which older tools and other programs describe unsupported formats."""


class NotServed(ValueError):
    """An unsupported format; the message names the key and an alternative."""


@dataclass(frozen=True)
class Scheme:
    """fp8 projections: weight ≈ value x scale, and inputs become fp8 before the product."""

    weights: Literal["rows", "blocks"] = "rows"
    """The weights that share a scale: one output's (or a whole tensor's), or BLOCK x BLOCK."""
    inputs: Literal["dynamic", "static"] = "dynamic"
    """dynamic: a scale per token from its largest element (with blocks, per BLOCK elements), even in schemes with one
    scale for all tokens, so that an answer does not depend on its batch. static: the checkpoint's scale."""
    at_load: bool = False
    """The checkpoint has floats, quantised while loading."""


ONLINE = Scheme(at_load=True)
"""Used by `--quantization fp8` for an unquantised checkpoint."""


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None: not quantised. Raises NotServed."""
    for key in _OTHER_KEYS:
        if settings := config.get(key):
            method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
            raise NotServed(f"{key} (quant_method {method!r}) is not supported: {WHAT_TO_DO}")
    settings = config.get("quantization_config")
    if not settings:
        return None
    where = "quantization_config"
    if not isinstance(settings, dict):
        raise NotServed(f"{where} = {settings!r} is not supported: {WHAT_TO_DO}")
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(settings, where)
    if method == "compressed-tensors":
        return _compressed(settings, where)
    raise NotServed(f"{where}.quant_method = {method!r} is not supported: {WHAT_TO_DO}")


def _fp8(settings: Mapping[str, Any], where: str) -> Scheme:
    _only(settings, _FP8_KEYS, where)
    _one_of(settings, "fmt", (None, "e4m3", "float8_e4m3fn"), where)
    _one_of(settings, "scale_fmt", (None, "float"), where)
    _one_of(settings, "kv_cache_scheme", (None, "static"), where)
    _one_of(settings, "expert_dtype", (None, "fp8"), where)
    scheme = _one_of(settings, "activation_scheme", ("dynamic", "static"), where)
    blocks = _blocks(settings, "weight_block_size", where)
    if blocks and scheme == "static":
        raise NotServed(f"{where}.activation_scheme = 'static' with a weight_block_size is not supported: {WHAT_TO_DO}")
    return Scheme("blocks" if blocks else "rows", scheme)


def _compressed(settings: Mapping[str, Any], where: str) -> Scheme:
    _only(settings, _COMPRESSED_KEYS, where)
    _one_of(settings, "format", ("float-quantized",), where)
    _one_of(settings, "quantization_status", (None, "compressed"), where)
    for key in ("sparsity_config", "transform_config"):
        given = settings.get(key)
        if given and given != {"format": "dense"}:
            raise NotServed(f"{where}.{key} = {given!r} is not supported: {WHAT_TO_DO}")
    if (cache := settings.get("kv_cache_scheme")) is not None:
        _fp8_tensor(cache, f"{where}.kv_cache_scheme", ("tensor",), (False,))
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise NotServed(f"{where}.config_groups = {groups!r}: it has to say how weights are quantised")
    schemes = {_group(group, f"{where}.config_groups.{name}") for name, group in groups.items()}
    if len(schemes) > 1:
        raise NotServed(f"{where}.config_groups: several schemes in one model are not supported: {WHAT_TO_DO}")
    return schemes.pop()


def _group(group: Any, where: str) -> Scheme:
    if not isinstance(group, dict):
        raise NotServed(f"{where} = {group!r} is not an object")
    _only(group, _GROUP_KEYS, where)
    _one_of(group, "format", (None, "float-quantized"), where)
    _one_of(group, "output_activations", (None,), where)
    weights = _fp8_tensor(group.get("weights"), f"{where}.weights", ("tensor", "channel", "block"), (None, False))
    _one_of(group["weights"], "group_size", (None,), f"{where}.weights")
    blocks = _blocks(group["weights"], "block_structure", f"{where}.weights")
    if blocks != (weights == "block"):
        raise NotServed(f"{where}.weights.block_structure = {group['weights'].get('block_structure')!r} does not fit")
    inputs, there = group.get("input_activations"), f"{where}.input_activations"
    if inputs is None:
        raise NotServed(f"{there} = None (only the weights in fp8) is not supported: {WHAT_TO_DO}")
    dynamic = isinstance(inputs, dict) and inputs.get("dynamic") is True
    _fp8_tensor(inputs, there, ("group",) if blocks else ("token", "tensor") if dynamic else ("tensor",), (dynamic,))
    _one_of(inputs, "group_size", (BLOCK if blocks else None,), there)
    _one_of(inputs, "block_structure", (None,), there)
    if blocks and not dynamic:
        raise NotServed(f"{there}.dynamic = False with blocks is not supported: {WHAT_TO_DO}")
    return Scheme("blocks" if blocks else "rows", "dynamic" if dynamic else "static")


def _fp8_tensor(settings: Any, where: str, strategies: Sequence[str], dynamic: Sequence[bool | None]) -> str:
    """Returns its strategy, one of those given."""
    if not isinstance(settings, dict):
        raise NotServed(f"{where} = {settings!r} is not an object")
    _only(settings, _TENSOR_KEYS, where)
    _one_of(settings, "num_bits", (8,), where)
    _one_of(settings, "type", ("float",), where)
    _one_of(settings, "symmetric", (True,), where)
    _one_of(settings, "actorder", (None,), where)
    _one_of(settings, "dynamic", dynamic, where)
    return str(_one_of(settings, "strategy", strategies, where))


def _blocks(settings: Mapping[str, Any], key: str, where: str) -> bool:
    block = settings.get(key)
    if block not in (None, [BLOCK, BLOCK], (BLOCK, BLOCK), f"{BLOCK}x{BLOCK}"):
        raise NotServed(f"{where}.{key} = {block!r} is not supported, only {BLOCK} x {BLOCK}: {WHAT_TO_DO}")
    return block is not None


def _one_of(settings: Mapping[str, Any], key: str, values: Sequence[Any], where: str) -> Any:
    given = settings.get(key)
    if not any(given == value and type(given) is type(value) for value in values):
        raise NotServed(f"{where}.{key} = {given!r} is not supported: {WHAT_TO_DO}")
    return given


def _only(settings: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if unknown := [f"{where}.{key} = {value!r}" for key, value in settings.items() if value and key not in known]:
        raise NotServed(f"settings that are not known here and may change the result: {', '.join(unknown)}")
