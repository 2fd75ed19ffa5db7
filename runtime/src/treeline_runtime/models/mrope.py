"""Positions with three axes: a token of an image is at a frame, a row and a column, and rotated by each in part.

    tokens     a  b  [ 2 x 3 of an image ]  c  d      delta = -3
    frame      0  1   2  2  2  2  2  2      5  6
    row        0  1   2  2  2  3  3  3      5  6
    column     0  1   2  3  4  2  3  4      5  6

The text behind an item continues after the largest of the item's positions. No item reaches further than its tokens
do, so positions stay within the tables of the context length, and tables of plain positions serve text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.messages import MediaItem
from treeline_runtime.models.model_config import MRopeConfig


def positions_of(config: MRopeConfig, length: int, items: Sequence[MediaItem]) -> tuple[npt.NDArray[np.int64], int]:
    """Positions of the first `length` tokens, (3, length), and `delta`: a token behind the last item, generated
    ones too, has three times its index + delta, which is never above it. items: all of the prompt, by place."""
    found = np.empty((3, length), dtype=np.int64)
    index = position = 0
    for item in items:
        before = item.start - index
        found[:, index : item.start] = np.arange(position, position + before)
        position += before
        frames, rows, columns = item.grid[0], item.grid[1] // config.merge, item.grid[2] // config.merge
        # Frames of very few tokens are put closer together than they were trained, so that no position is above its
        # index. A step is a fraction of 32 bits, as for transformers.
        step = min(config.frame_step * np.float32(item.seconds), np.float32(rows * columns))
        places = np.indices((frames, rows, columns)).reshape(3, -1)
        places[0] = places[0].astype(np.float32) * step
        index = item.start + item.count
        found[:, item.start : index] = position + places
        position += max(int(np.float32(frames - 1) * step) + 1, rows, columns)
    found[:, index:] = np.arange(position, position + length - index)
    return found, position - index


class MRope:
    """The positions of prompts with items, and their angles."""

    def __init__(self, config: MRopeConfig, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """cos, sin: `Decoder.rope`, of one rope."""
        self._config = config
        self._axes = torch.tensor(config.axes * 2, device=cos.device)
        self._tables = cos[0], sin[0]

    def positions(self, length: int, items: Sequence[MediaItem]) -> tuple[npt.NDArray[np.int64], int]:
        """See `positions_of`."""
        return positions_of(self._config, length, items)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (3, tokens) int64 → cos, sin, each (1, tokens, 1, rotated elements of a head), as `Ops.look_up`
        finds them for plain positions."""
        cos, sin = (table.gather(0, positions[self._axes].t())[None, :, None] for table in self._tables)
        return cos, sin
