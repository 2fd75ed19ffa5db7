"""A page outside the device: one object with an identity, all of its components, and one checksum.

A page is named by its digest, the hash chain of its tokens and all before them from its namespace on. What made its
numbers is named by a fingerprint of model and format. A page is its bytes, what a drafter keeps for its tokens and then
[layers, 2, page_size, kv_heads, head_dim] with keys before values: no part of it can be moved, lost or replaced alone.
The checksum covers fingerprint, digest and bytes, so a page under another name, of another model, or with a wrong byte
anywhere does not pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

FINGERPRINT_BYTES = 16
SAMPLES = 16
"""Pieces of each file of weights that a fingerprint reads."""
SAMPLE_BYTES = 4096
CHUNK_BYTES = 4 << 20
"""Pages of so many bytes travel together between runtimes …"""
MOST_CHUNK_PAGES = 256
"""… but no more than these."""


class BadPage(Exception):
    """It is not the page that was asked for."""


@dataclass(frozen=True)
class PageFormat:
    """What all pages of a store have in common."""

    fingerprint: bytes
    nbytes: int

    @property
    def chunk_pages(self) -> int:
        """Pages that travel together between runtimes."""
        return min(max(1, CHUNK_BYTES // self.nbytes), MOST_CHUNK_PAGES)

    def checksum(self, digest: bytes, data: memoryview) -> int:
        """xxh3 of a page, 64 bits."""
        return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(self.fingerprint + digest))


def format_of(
    model: Path,
    *,
    num_layers: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    drafter: tuple[Path, int] | None = None,
    also: Iterable[object] = (),
) -> PageFormat:
    """The format of pages that the checkpoint in folder `model` computes. drafter: a folder of weights that guess, and
    the bytes that they keep in a page. also: further facts on which the numbers depend, such as dtypes."""
    folder, more = (None, 0) if drafter is None else drafter
    shape = (num_layers, 2, page_size, num_kv_heads, head_dim, element_bytes)
    digest = hashlib.blake2b(repr((shape, *also)).encode(), digest_size=FINGERPRINT_BYTES)
    for checkpoint in (model,) if folder is None else (model, folder):
        with contextlib.suppress(FileNotFoundError):  # random weights have a config at most
            digest.update((checkpoint / "config.json").read_bytes())
            for file in sorted(checkpoint.glob("*.safetensors")):
                digest.update(_facts_of(file))
    return PageFormat(digest.digest(), math.prod(shape) + more)


def _facts_of(file: Path) -> bytes:
    """Name, size, time and header of a file of weights, and samples of its numbers: headers of two fine-tuned models
    are equal, and so may be the times of files in an image."""
    stat = file.stat()
    digest = hashlib.blake2b(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        digest.update(opened.read(min(header, stat.st_size)))
        for i in range(SAMPLES):
            opened.seek(stat.st_size * i // SAMPLES)
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.digest()
