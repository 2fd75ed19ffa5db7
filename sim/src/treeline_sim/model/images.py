"""Prompts with images, as engines announce them and as pickers know them."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from treeline_wire.keys import escape
from treeline_wire.media import DIGEST_BYTES, Item, item_ids

from treeline_sim.model.text import Text, token_bytes

PAD = len(token_bytes())
"""The placeholder's id."""


class Placed(NamedTuple):
    """An image of a prompt, and its first token there."""

    start: int
    item: Item


def draw_image(count: int, rng: random.Random) -> Item:
    """Return an image of this many tokens."""
    return Item("image", rng.randbytes(DIGEST_BYTES), count)


class PicturedText(Text):
    """A text with images. `vllm`: events have placeholders, and the images' names beside them; else the images' ids."""

    __slots__ = ("images", "vllm")

    def __init__(
        self,
        block_size: int,
        raw: bytes = b"",
        before: tuple[int, ...] = (),
        images: tuple[Placed, ...] = (),
        vllm: bool = False,
    ) -> None:
        super().__init__(block_size, raw, before)
        self.images = images
        self.vllm = vllm

    @property
    def items(self) -> tuple[Item, ...]:
        """Return the images in order."""
        return tuple(item for _, item in self.images)

    @property
    def key(self) -> bytes:
        """Return the prefix key, in which each image is an escape of the placeholder."""
        parts, at = [], 0
        for start, item in self.images:
            parts += [self._raw[2 * at : 2 * start].hex().encode(), escape(PAD)]
            at = start + item.count
        return b"".join([*parts, self._raw[2 * at :].hex().encode()])

    def extended(self, tokens: int, rng: random.Random) -> PicturedText:
        """Return this text with random tokens after it."""
        longer = super().extended(tokens, rng)
        return PicturedText(self.block_size, longer._raw, longer.blocks, self.images, self.vllm)

    def shown(self, item: Item) -> PicturedText:
        """Return this text with an image after it."""
        words = np.array(item_ids(item.digest, item.count), np.uint32).view(np.uint16).reshape(-1, 2)
        raw = (words[:, 0] ^ words[:, 1]).tobytes()  # only the hashes of its blocks are made of it
        images = (*self.images, Placed(self.tokens, item))
        return PicturedText(self.block_size, self._raw + raw, self.blocks, images, self.vllm)

    def ids(self, first: int, last: int, block_size: int) -> list[int]:
        """Return the token ids of some of its blocks."""
        begin, end = first * block_size, last * block_size
        ids = super().ids(first, last, block_size)
        for start, item in self.images:
            low, high = max(start, begin), min(start + item.count, end)
            if low < high:
                spelled = [PAD] * item.count if self.vllm else item_ids(item.digest, item.count)
                ids[low - begin : high - begin] = spelled[low - start : high - start]
        return ids

    def extra_keys(self, first: int, last: int, block_size: int) -> list[list[object] | None] | None:
        """Return vLLM's list for some of its blocks: the images in each, and where they begin, from the block on."""
        if not self.vllm:
            return None
        found: list[list[object] | None] = []
        for begin in range(first * block_size, last * block_size, block_size):
            here = [
                [item.digest.hex(), start - begin]
                for start, item in self.images
                if start < begin + block_size and start + item.count > begin
            ]
            found.append([*here] or None)
        return found
