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


PREFIX = "model."
"""Of the decoder's tensors; a checkpoint of a decoder alone (`Qwen3Model`, an embedding model) is saved without it."""
EMBEDDING = PREFIX + "embed_tokens.weight"
HEAD = "lm_head.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SPARE = (".rotary_emb.inv_freq",)
"""Endings of tensors that nobody takes: old checkpoints carry rope's frequencies, which follow from config.json."""


class Weights(Protocol):
    """A model takes each tensor once, by the name and shape it expects."""

    def has(self, name: str) -> bool:
        """Whether `take` would find it."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, in the engine's dtype and on its device. Raises ModelError."""

    def ignore(self, name: str) -> None:
        """Nobody will take it: it need not be there, and may."""


class Checkpoint:
    """The weights of a directory, from the files that transformers would read: model.safetensors, else the shards that
    model.safetensors.index.json names. Other *.safetensors beside them (consolidated ones, say) are not read."""

    def __init__(self, directory: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dir = Path(directory)
        self._dtype = dtype
        self._device = device
        self._open: dict[str, Any] = {}
        self._file_of = self._find()
        self._untaken = set(self._file_of)
        self._bare = EMBEDDING.removeprefix(PREFIX) in self._file_of

    def _find(self) -> dict[str, str]:
        """Tensor → file."""
        found = sorted(path.name for path in self._dir.glob("*.safetensors"))
        if SINGLE in found:
            file_of = dict.fromkeys(self._names(SINGLE), SINGLE)
        elif (self._dir / INDEX).is_file():
            file_of = self._index()
        elif found:
            raise ModelError(
                f"{self._dir} has {', '.join(found[:3])}{' …' if found[3:] else ''}, but neither {SINGLE} nor {INDEX}: "
                "which of them belong to the model? Rename a single file, or add the index of its shards"
            )
        else:
            raise ModelError(f"{self._dir} has no *.safetensors; other weight formats are not supported")
        if other := set(found) - set(file_of.values()):
            logger.warning("%s: %s and others like it are not read", self._dir, min(other))
        return file_of

    def _index(self) -> dict[str, str]:
        """What the index says, once the files agree with it."""
        index = self._dir / INDEX
        try:
            file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        for file in sorted(set(map(str, file_of.values()))):
            if Path(file).name != file:
                raise ModelError(f"{index} names {file!r}, which is not a file of the same directory")
            named = {name for name, where in file_of.items() if where == file}
            there = self._names(file)
            if missing := named - there:
                raise ModelError(f"{index} does not fit {file}: tensor {min(missing)} is not in it")
            if extra := there - named:
                raise ModelError(f"{index} does not fit {file}: it does not say that tensor {min(extra)} is there")
        return file_of

    def _names(self, file: str) -> set[str]:
        return set(self._handle(file).keys())

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._dir / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {self._dir / file}: {error}") from error
        return self._open[file]

    def has(self, name: str) -> bool:
        return self._saved(name) in self._file_of

    def ignore(self, name: str) -> None:
        """From now on the tensor is not there, whether or not it was."""
        self._untaken.discard(self._saved(name))
        self._file_of.pop(self._saved(name), None)

    def _saved(self, name: str) -> str:
        """What the files call it."""
        return name.removeprefix(PREFIX) if self._bare else name

    def take(self, name: str, *shape: int) -> torch.Tensor:
        name = self._saved(name)
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"tensor {name} is missing in {self._dir}; is it a complete, unquantised checkpoint?")
        self._untaken.discard(name)
        tensor: torch.Tensor = self._handle(file).get_tensor(name)
        if tensor.dtype not in DTYPES:
            raise ModelError(f"tensor {name} is {tensor.dtype}; quantised checkpoints are not supported")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def close(self) -> None:
        """Let go of the files. Raises ModelError for tensors that nobody took: the model is not what it seems."""
        self._open.clear()
        if spare := [name for name in self._untaken if not name.endswith(SPARE)]:
            raise ModelError(
                f"{self._dir} has {len(spare)} tensors that this model does not have, e.g. {min(spare)}: served "
                "without them it would be another model"
            )


class RandomWeights:
    """Seeded noise, scaled so that activations neither vanish nor explode; norms are ones."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        return name != HEAD  # so that a tied one is tied

    def ignore(self, name: str) -> None:
        """There is nothing to leave out."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        tensor = torch.randn(shape, generator=self._generator, device=self._device)
        return tensor.mul_(shape[-1] ** -0.5).to(self._dtype)
