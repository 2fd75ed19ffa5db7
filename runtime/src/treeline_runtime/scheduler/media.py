"""Images and videos in prompts: which ones a model takes, and what a step needs of them.

Ids of their tokens spell the item in cache keys alone. On the device the tokens are the model's placeholders, whose
embeddings are overwritten; penalties and log probabilities of the prompt see these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from treeline_wire.media import private_digest

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Batch
from treeline_runtime.messages import GenerateReq, MediaItem
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.mrope import positions_of
from treeline_runtime.scheduler.embeddings import most_tokens
from treeline_runtime.scheduler.plan import ItemPart, MediaPlan


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """The items of a request."""

    items: tuple[MediaItem, ...]
    """With digests that no other namespace has."""
    placeholders: tuple[int, ...]
    """The id of each one's tokens in the vocabulary."""
    positions: npt.NDArray[np.int64] | None
    """(3, prompt), for models with positions of their own."""
    delta: int
    """What is added to the positions of the output, for its angles."""
    is_whole: bool = False
    """No chunk and no match ends within an item: its tokens see each other in both directions."""

    @property
    def end(self) -> int:
        """The position after the last item."""
        return self.items[-1].start + self.items[-1].count

    def uncut(self, end: int) -> int:
        """The end of a chunk or match that would end there: before an item that may not be cut."""
        cut = (item.start for item in self.items if item.start < end < item.start + item.count)
        return next(cut, end) if self.is_whole else end

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


class Intake:
    """The items that a model takes."""

    def __init__(self, config: SchedulerConfig, model: Decoder) -> None:
        """Keeps nothing of the model that is on the device."""
        self._problem = _problem(config, model)
        self._placeholders: Mapping[str, int] = model.config.placeholders
        self._mrope, self._is_whole = model.config.mrope, model.config.both_ways
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
            positions, delta = positions_of(self._mrope, len(message.input_ids), message.items)
        items = tuple(replace(item, digest=private_digest(item.digest, message.namespace)) for item in message.items)
        return Media(items, tuple(self._placeholders[item.kind] for item in items), positions, delta, self._is_whole)


def _problem(config: SchedulerConfig, model: Decoder) -> str | None:
    if model.media is None:
        return "this model takes no images and no videos"
    if config.speculative_draft_model_path is not None:
        return "this server takes no images and no videos, as it has a draft model (--speculative-draft-model-path)"
    return None if model.pooler is None else "this server makes vectors of text alone: it takes no images and no videos"
