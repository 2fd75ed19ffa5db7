"""Prompts with images, as engines announce them and as pickers know them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from treeline_wire.keys import escape
from treeline_wire.media import digest_of, item_ids

from treeline_sim.model.text import Text, token_bytes

PAD = len(token_bytes())
"""The placeholder's id."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image: a hash of its bytes, and the number of its tokens."""

    sha256: bytes
    tokens: int

    def ids(self) -> list[int]:
        """Return the ids of its tokens in our runtime."""
        return item_ids(digest_of("image", self.sha256, ""), self.tokens)


def draw_image(tokens: int, rng: random.Random) -> Image:
    """Return an image of this many tokens."""
    return Image(rng.randbytes(32), tokens)


class PicturedText(Text):
    """A text with images, which are given with their first tokens. `vllm`: events have placeholders, and the images'
    names beside them; else the images' ids.
    """

    __slots__ = ("images", "vllm")

    def __init__(
        self,
        block_size: int,
        raw: bytes = b"",
        before: tuple[int, ...] = (),
        images: tuple[tuple[int, Image], ...] = (),
        vllm: bool = False,
    ) -> None:
        super().__init__(block_size, raw, before)
        self.images = images
        self.vllm = vllm

    @property
    def key(self) -> bytes:
        """Return the prefix key, in which each image is an escape of the placeholder."""
        parts, at = [], 0
        for start, image in self.images:
            parts += [self._raw[2 * at : 2 * start].hex().encode(), escape(PAD)]
            at = start + image.tokens
        return b"".join([*parts, self._raw[2 * at :].hex().encode()])

    def extended(self, tokens: int, rng: random.Random) -> PicturedText:
        """Return this text with random tokens after it."""
        longer = super().extended(tokens, rng)
        return PicturedText(self.block_size, longer._raw, longer.blocks, self.images, self.vllm)

    def shown(self, image: Image) -> PicturedText:
        """Return this text with an image after it."""
        words = np.array(image.ids(), np.uint32).view(np.uint16).reshape(-1, 2)
        raw = (words[:, 0] ^ words[:, 1]).tobytes()  # only the hashes of its blocks are made of it
        images = (*self.images, (self.tokens, image))
        return PicturedText(self.block_size, self._raw + raw, self.blocks, images, self.vllm)

    def ids(self, first: int, last: int, block_size: int) -> list[int]:
        """Return the token ids of some of its blocks."""
        begin, end = first * block_size, last * block_size
        ids = super().ids(first, last, block_size)
        for start, image in self.images:
            low, high = max(start, begin), min(start + image.tokens, end)
            if low < high:
                spelled = [PAD] * image.tokens if self.vllm else image.ids()
                ids[low - begin : high - begin] = spelled[low - start : high - start]
        return ids

    def extra_keys(self, first: int, last: int, block_size: int) -> list[list[object] | None] | None:
        """Return vLLM's list for some of its blocks: the images in each, and where they begin, from the block on."""
        if not self.vllm:
            return None
        found: list[list[object] | None] = []
        for begin in range(first * block_size, last * block_size, block_size):
            here = [
                [image.sha256.hex(), start - begin]
                for start, image in self.images
                if start < begin + block_size and start + image.tokens > begin
            ]
            found.append([*here] or None)
        return found
