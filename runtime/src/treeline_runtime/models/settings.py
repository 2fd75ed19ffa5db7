"""Files of a checkpoint and values of config.json, read with errors that name the file or the key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SLIDING = "sliding_attention"
FULL = "full_attention"


class ModelError(Exception):
    """The checkpoint cannot be served; the message says which file or setting, and what would do."""


def read_json(path: Path) -> Any:
    """What a file of the checkpoint says. Raises ModelError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model directory has the Hugging Face layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The same of a file that has to be a JSON object."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object")
    return data


def flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return bool(value)


def positive(config: Mapping[str, Any], key: str) -> float | None:
    """A number above 0; None where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return None
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{key} must be above 0, not {value!r}")
    return float(value)


def needed(config: Mapping[str, Any], key: str) -> float:
    """A number above 0 that has to be there."""
    if (value := positive(config, key)) is None:
        raise KeyError(key)
    return value


def layer_types(config: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """What each layer is: `layer_types`, or the default where it is missing."""
    given = config.get("layer_types")
    kinds = list(default) if given is None else [str(kind) for kind in given]
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ModelError(f"layers of type {', '.join(unknown)} are not supported (layer_types)")
    if len(kinds) != len(default):
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {len(default)} layers")
    return kinds


def windows(kinds: Sequence[str], size: object) -> tuple[int | None, ...]:
    """For `Scoring.windows`: of `size` tokens (`sliding_window`) where a layer is SLIDING; () where none is."""
    if SLIDING not in kinds:
        return ()
    if size is None:
        raise ModelError(f"config.json has layers of type {SLIDING}, but no sliding_window")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ModelError(f"config.json: sliding_window must be a whole number of at least 1, not {size!r}")
    size = min(size, 1 << 30)  # kernels count in 32 bits; no context is as long
    return tuple(size if kind == SLIDING else None for kind in kinds)
