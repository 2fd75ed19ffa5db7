"""Embeddings of images and videos, by digest.

A prompt is computed in one step after the other, so what its next step needs was used last: where there are too many,
the least recently used ones go, and no request needs to hold any.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from treeline_runtime.memory import EMBEDDINGS_BYTES
from treeline_runtime.messages import MediaItem
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.scheduler.plan import MediaPlan
from treeline_runtime.transfer import upload


def most_tokens(model: Decoder) -> int:
    """Tokens of items whose embeddings, with further features, are kept."""
    depth = 0 if model.media is None else model.media.depth
    return EMBEDDINGS_BYTES // ((1 + depth) * model.config.hidden_size * model.rope[0].element_size())


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a step did for its items."""

    needed: int
    """Different items."""
    kept: int
    """Of these, those whose embeddings were there."""
    tokens: int
    """Of those that were encoded."""
    seconds: Callable[[], float]
    """The time that it took, once the step is done."""


@dataclass(frozen=True, slots=True)
class StepMedia:
    """What a step needs of items, on the device."""

    parts: list[tuple[int, torch.Tensor]]
    """First token in the step, and (tokens, (1 + depth) * hidden) from there on."""
    positions: torch.Tensor | None
    """(3, tokens) int64, for models with positions of their own."""

    def put(self, x: torch.Tensor) -> torch.Tensor | None:
        """Overwrites embeddings in x (tokens, hidden). Returns `Context.deep`."""
        hidden, deep = x.shape[1], None
        for at, rows in self.parts:
            x[at : at + len(rows)] = rows[:, :hidden]
            if rows.shape[1] > hidden:
                further = rows[:, hidden:].unflatten(1, (-1, hidden)).transpose(0, 1)
                if deep is None:
                    deep = x.new_zeros(len(further), *x.shape)
                deep[:, at : at + len(rows)] = further
        return deep


class Embeddings:
    """Owns embeddings of items, the least recently used first."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        assert model.media is not None
        self._encoder = model.media
        self._most = most_tokens(model)
        self._device = device
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def step(self, plan: MediaPlan) -> tuple[list[tuple[int, torch.Tensor]], Encoded]:
        """`StepMedia.parts`. Encodes what is missing, together. Raises OSError or ValueError if an item's file is not
        there or of another size; what was kept before stays."""
        needed = {part.item.digest: part.item for part in plan.parts}
        missing = [item for digest, item in needed.items() if digest not in self._rows]
        inputs = [(item, self._read(item)) for item in missing]
        seconds = self._encode(inputs) if inputs else lambda: 0.0
        encoded = Encoded(len(needed), len(needed) - len(missing), sum(item.count for item in missing), seconds)
        parts = [(part.at, self._rows[part.item.digest][part.begin : part.end]) for part in plan.parts]
        for digest in needed:
            self._rows.move_to_end(digest)
        held = sum(map(len, self._rows.values()))
        while held > self._most:
            held -= len(self._rows.popitem(last=False)[1])
        return parts, encoded

    def _read(self, item: MediaItem) -> torch.Tensor:
        data = np.fromfile(item.path, dtype="<f4", count=math.prod(item.shape), offset=item.offset)
        try:
            return upload(data.reshape(item.shape), self._device)
        except ValueError:
            raise ValueError(f"the {item.kind}'s file has {data.size} numbers, not {item.shape}") from None

    def _encode(self, inputs: list[tuple[MediaItem, torch.Tensor]]) -> Callable[[], float]:
        began = time.perf_counter()
        events = []
        if self._device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        made = self._encoder.encode(inputs)
        for (item, _), rows in zip(inputs, made, strict=True):
            if len(rows) != item.count:
                raise ValueError(f"the {item.kind} has {len(rows)} embeddings for {item.count} tokens")
            self._rows[item.digest] = rows
        if events:
            events[1].record()
            return lambda: events[0].elapsed_time(events[1]) / 1000
        took = time.perf_counter() - began
        return lambda: took
