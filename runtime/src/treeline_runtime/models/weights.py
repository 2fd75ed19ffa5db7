"""A model's tensors: from safetensors files, or random numbers of the right shapes."""

from __future__ import annotations

import json
import logging
import time
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from treeline_runtime.models.config import ModelError
from treeline_runtime.models.quantization.scheme import Scheme
from treeline_runtime.models.shards import WHOLE, Cut, Rank
from treeline_runtime.models.stream import Entry, Streamed, cut_from, read_header, reading_order

logger = logging.getLogger(__name__)


PREFIX = "model."
"""Prefix of the decoder's tensors."""
LANGUAGE = "language_model."
"""Prefix of the whole language model, with its head, in checkpoints of LLaVA's layout."""
PREFIXES = ("model.language_model.", LANGUAGE + PREFIX, PREFIX, "")
"""Its forms in files: beside an encoder, in language models, and in checkpoints of a decoder alone (`Qwen3Model`)."""
ENCODERS = VISION, TOWER, AUDIO, PROJECTOR = "visual.", "vision_tower.", "audio_tower.", "multi_modal_projector."
"""Prefixes of encoders' tensors. Newer versions of transformers put them behind `PREFIX`."""
EMBEDDING = PREFIX + "embed_tokens.weight"
HEAD = "lm_head.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SPARE = (".rotary_emb.inv_freq",)
"""Endings of unused tensors: old checkpoints contain rope frequencies, which follow from config.json."""


MAPPED = ("cpu",)
PROGRESS_S = 2.0


class Weights(Protocol):
    """A model takes each tensor once, by name and shape."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme | None
    """The quantisation of projections; None if they have none."""
    rank: Rank
    """The rank that takes them; the model says which part of a tensor it takes."""
    experts: Rank
    """Its place among the ranks over which whole experts are divided; `WHOLE`: it has a part of every expert."""

    def has(self, name: str) -> bool:
        """Whether `take` would find it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that may have one of several; (): it has any. Raises ModelError if it is missing."""

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, cut: Cut | None = None) -> torch.Tensor:
        """The tensor of this shape on the engine's device, or a part of it, in the engine's dtype or `dtype`; fp8 must
        be fp8 in the checkpoint. Raises ModelError."""

    def ignore(self, *modules: str) -> None:
        """Does not read these tensors, or all tensors of these modules: they are never taken, and may be missing."""


class Checkpoint:
    """The weights of a directory, from the files that transformers would read: model.safetensors, else the shards in
    model.safetensors.index.json. Other *.safetensors, such as consolidated ones, are not read.

    On a CPU tensors are memory-mapped until they are changed; other devices use `stream.Streamed`. A context manager
    that closes the files.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
        rank: Rank = WHOLE,
        experts: Rank = WHOLE,
    ) -> None:
        self.dtype = dtype
        self.scheme = scheme
        self.rank, self.experts = rank, experts
        self._dir = Path(directory)
        self.device = device
        self._open: dict[str, Any] = {}
        self._file_of = self._find()
        self._untaken = set(self._file_of)
        embedding = EMBEDDING.removeprefix(PREFIX)
        found = [prefix for prefix in PREFIXES if prefix + embedding in self._file_of]
        self._prefix = found[0] if found else PREFIX
        is_inside = any(name.startswith(tuple(PREFIX + encoder for encoder in ENCODERS)) for name in self._file_of)
        self._of_encoders = PREFIX if is_inside else ""
        self._streamed = None if device.type in MAPPED else self._stream()
        size = sum((self._dir / file).stat().st_size for file in set(self._file_of.values()))
        self._progress = _Progress(size // (rank.count * rank.stages))

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
        """The index, if the files agree with it."""
        index = self._dir / INDEX
        try:
            file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
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

    def _stream(self) -> Streamed:
        found: dict[str, Entry] = {}
        for file in set(self._file_of.values()):
            found |= read_header(self._dir / file)
        names = [name for name in self._file_of if not name.endswith(SPARE)]
        return Streamed(
            {name: found[name] for name in reading_order(names, (self._saved(EMBEDDING), self._saved(HEAD)))},
            self.device,
            in_parts=max(self.rank.count, self.experts.count) > 1,
        )

    def has(self, name: str) -> bool:
        return self._saved(name) in self._file_of

    def ignore(self, *modules: str) -> None:
        """Treats them as absent from now on."""
        ignored = set(map(self._saved, modules))
        for name in list(self._file_of):
            if not ignored.isdisjoint(accumulate(name.split("."), "{}.{}".format)):
                del self._file_of[name]
                self._untaken.discard(name)
                if self._streamed is not None:
                    self._streamed.skip(name)

    def _saved(self, name: str) -> str:
        """Its name in the files."""
        if name.startswith(PREFIX):
            return self._prefix + name.removeprefix(PREFIX)
        if name == HEAD and self._prefix.startswith(LANGUAGE):
            return LANGUAGE + name
        return self._of_encoders + name if name.startswith(ENCODERS) else name

    def has_any(self, endings: tuple[str, ...]) -> bool:
        return any(name.endswith(endings) for name in self._file_of)

    def _file(self, name: str) -> str:
        """The file of a tensor by its name in the files. Raises ModelError."""
        if name not in self._file_of:
            raise ModelError(f"tensor {name} is missing in {self._dir}; is the checkpoint complete?")
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape(self._saved(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(self._file(name)).get_slice(name).get_shape())

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, cut: Cut | None = None) -> torch.Tensor:
        name = self._saved(name)
        file = self._file(name)
        streamed = self._streamed if name in self._untaken else None  # which gives a tensor once
        self._untaken.discard(name)
        if cut is not None and (whole := self._shape(name)) != shape:
            raise _misshapen(name, whole, shape)
        if streamed is not None:
            tensor = streamed.read(name, cut)
        else:
            tensor = self._handle(file).get_tensor(name)
            tensor = tensor if cut is None else cut_from(tensor, cut)
        wanted = dtype or self.dtype
        if wanted not in DTYPES and tensor.dtype != wanted:
            raise ModelError(f"tensor {name} is {tensor.dtype}, but as it has a scale it should be {wanted}")
        if wanted in DTYPES and tensor.dtype not in DTYPES:
            raise ModelError(
                f"tensor {name} is {tensor.dtype}; quantised tensors without a scale, or of other types than fp8 "
                "(e4m3), are not supported"
            )
        if cut is None and tuple(tensor.shape) != shape:
            raise _misshapen(name, tuple(tensor.shape), shape)
        self._progress.add(tensor.nbytes)
        return tensor.to(device=self.device, dtype=wanted)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.clear()
        if self._streamed is not None:
            self._streamed.close()
        if kind is None:
            self._progress.end()

    def check_all_taken(self) -> None:
        """Raises ModelError for unused tensors: the checkpoint is then of another model than its config says."""
        if spare := [name for name in self._untaken if not name.endswith(SPARE)]:
            raise ModelError(
                f"{self._dir} has {len(spare)} tensors that this model does not have, e.g. {min(spare)}: served "
                "without them it would be another model"
            )


def _misshapen(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> ModelError:
    return ModelError(f"tensor {name} has shape {found}, config.json asks for {shape}")


class RandomWeights:
    """Seeded noise, scaled so that activations neither vanish nor explode; norms are ones. Ranks have parts of the same
    numbers: each makes all of a tensor, from a seed of its own, and keeps its part."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
        rank: Rank = WHOLE,
        experts: Rank = WHOLE,
    ) -> None:
        self.dtype = dtype
        self.scheme = scheme
        self.rank, self.experts = rank, experts
        self._seed = seed
        self._generator = torch.Generator(device)
        self.device = device

    def has(self, name: str) -> bool:
        return name != HEAD  # so that a tied one is tied

    def ignore(self, *modules: str) -> None:
        """Nothing is read."""

    def shape(self, name: str) -> tuple[int, ...]:
        return ()

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, cut: Cut | None = None) -> torch.Tensor:
        if "norm" in name:
            part = shape if cut is None else cut.shape(shape)
            return torch.ones(part, dtype=dtype or self.dtype, device=self.device)
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
        tensor = torch.randn(shape, generator=self._generator, device=self.device)
        tensor = tensor if cut is None else cut_from(tensor, cut)
        return tensor.mul_(shape[-1] ** -0.5).to(dtype or self.dtype)


class _Progress:
    """Logs loading progress."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._told = time.perf_counter()

    def add(self, size: int) -> None:
        self._done += size
        now = time.perf_counter()
        if now - self._told >= PROGRESS_S:
            self._told = now
            logger.info("weights: %.1f of %.1f GB", self._done / 1e9, self._total / 1e9)

    def end(self) -> None:
        seconds = time.perf_counter() - self._began
        logger.info("weights: %.2f GB in %.1f s", self._done / 1e9, seconds)
