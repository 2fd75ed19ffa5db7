"""Where a model's tensors come from: safetensors files, or random numbers of the right shapes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from treeline_runtime.models.config import ModelError

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """A model takes each tensor once, by the name and shape it expects."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, in the engine's dtype and on its device. Raises ModelError."""


class Checkpoint:
    """*.safetensors of a directory, one file or sharded by model.safetensors.index.json."""

    def __init__(self, directory: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dir = Path(directory)
        self._dtype = dtype
        self._device = device
        self._open: dict[str, Any] = {}
        self._file_of = self._index()
        self._untaken = set(self._file_of)

    def _index(self) -> dict[str, str]:
        index = self._dir / "model.safetensors.index.json"
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        files = sorted(p.name for p in self._dir.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{self._dir} has no *.safetensors; other weight formats are not supported")
        return {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118 (not a dict)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._dir / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {self._dir / file}: {error}") from error
        return self._open[file]

    def take(self, name: str, *shape: int) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(
                f"tensor {name} is missing in {self._dir}; is it a complete, unquantised checkpoint?"
            )
        self._untaken.discard(name)
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"tensor {name} is not in {self._dir / file}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}")
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} is {tensor.dtype}; quantised checkpoints are not supported")
        return tensor.to(device=self._device, dtype=self._dtype)

    def close(self) -> None:
        """Let go of the files; tell what nobody took."""
        self._open.clear()
        # a tied checkpoint may carry its head anyway, an old one its rope frequencies
        spare = {n for n in self._untaken if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")}
        if spare:
            logger.warning("%d tensors of %s are not used, e.g. %s", len(spare), self._dir, min(spare))


class RandomWeights:
    """Seeded noise, scaled so that activations neither vanish nor explode; norms are ones."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if "norm" in name:
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5
        return tensor.to(device=self._device, dtype=self._dtype)
