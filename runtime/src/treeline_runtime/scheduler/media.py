"""Images and videos in prompts: which a model takes, what a step needs of them, and their embeddings.

Ids of their tokens spell the item in cache keys alone. On the device the tokens are the model's placeholders, whose
embeddings are overwritten; penalties and log probabilities of the prompt see these.

Embeddings are kept by digest. A prompt is computed in one step after the other, so what its next step needs was used
last: where there are too many, the least recently used ones go, and no request needs to hold any.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Batch
from treeline_runtime.memory import EMBEDDINGS_BYTES
from treeline_runtime.messages import GenerateReq, MediaItem
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.scheduler.plan import ItemPart, MediaPlan
from treeline_runtime.transfer import upload


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """The items of a request."""

    items: tuple[MediaItem, ...]
    placeholders: tuple[int, ...]
    """The id of each one's tokens in the vocabulary."""
    positions: npt.NDArray[np.int64] | None
    """(3, prompt), for models with positions of their own."""
    delta: int
    """What is added to the positions of the output, for its angles."""

    @property
    def end(self) -> int:
        """The position after the last item."""
        return self.items[-1].start + self.items[-1].count

    def shown(self, tokens: list[int]) -> list[int]:
        """The tokens as the vocabulary has them."""
        shown = tokens[:]
        for item, placeholder in zip(self.items, self.placeholders, strict=True):
            shown[item.start : item.start + item.count] = [placeholder] * item.count
        return shown

    def positions_of(self, start: int, end: int) -> bytes:
        """(3, end - start) int64, of tokens of which the first is of the prompt."""
        assert self.positions is not None
        known = self.positions[:, start:end]
        output = np.arange(start + known.shape[1], end) + self.delta
        return np.concatenate((known, np.broadcast_to(output, (3, len(output)))), axis=1).tobytes()


def media_plan(batch: Batch) -> MediaPlan | None:
    """None: no items are needed, nor positions."""
    parts, positions, first = list[ItemPart](), dict[int, bytes](), 0
    for i, (req, start, end) in enumerate(zip(batch.reqs, batch.starts, batch.ends, strict=True)):
        if (media := req.media) is not None and start < req.prompt_len:
            for item in media.items:
                low, high = max(item.start, start), min(item.start + item.count, end)
                if low < high:
                    parts.append(ItemPart(item, low - item.start, high - item.start, first + low - start))
            if media.positions is not None:
                positions[i] = media.positions_of(start, end)
        first += end - start
    return MediaPlan(parts, positions) if parts or positions else None


class Takes:
    """The items that a model takes."""

    def __init__(self, config: SchedulerConfig, model: Decoder) -> None:
        """Keeps no weights of the model, which may have to let go of them."""
        self._problem = _problem(config, model)
        self._placeholders: Mapping[str, int] = model.config.placeholders
        self._mrope = model.mrope
        self._most = most_tokens(model)

    def media_of(self, message: GenerateReq) -> Media | str:
        """Why the request can never be served, if it is text."""
        if self._problem is not None:
            return self._problem
        for item in message.items:
            if item.kind not in self._placeholders:
                return f"this model takes no {item.kind}s"
            if item.count > self._most:
                return f"the {item.kind} takes {item.count} tokens; at most {self._most} of one fit: make it smaller"
        positions, delta = None, 0
        if self._mrope is not None:
            positions, delta = self._mrope.positions(len(message.input_ids), message.items)
        return Media(message.items, tuple(self._placeholders[item.kind] for item in message.items), positions, delta)


def _problem(config: SchedulerConfig, model: Decoder) -> str | None:
    if model.media is None:
        return "this model takes no images and no videos"
    if config.speculative_draft_model_path is not None:
        return "this server takes no images and no videos, as it has a draft model (--speculative-draft-model-path)"
    return None if model.pooler is None else "this server makes vectors of text alone: it takes no images and no videos"


def _token_bytes(model: Decoder) -> int:
    """Of an embedding with its further features."""
    depth = 0 if model.media is None else model.media.depth
    return (1 + depth) * model.config.hidden_size * model.rope[0].element_size()


def most_tokens(model: Decoder) -> int:
    """Tokens of items whose embeddings are kept."""
    return EMBEDDINGS_BYTES // _token_bytes(model)


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
        seconds = self._encode(inputs) if inputs else float
        encoded = Encoded(len(needed), len(needed) - len(missing), sum(item.count for item in missing), seconds)
        parts = [(part.at, self._rows[part.item.digest][part.begin : part.end]) for part in plan.parts]
        for digest in needed:
            self._rows.move_to_end(digest)
        held = sum(map(len, self._rows.values()))
        while held > self._most:
            held -= len(self._rows.popitem(last=False)[1])
        return parts, encoded

    def _read(self, item: MediaItem) -> torch.Tensor:
        data = np.fromfile(item.path, dtype="<f4")
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
