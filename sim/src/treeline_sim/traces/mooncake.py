"""A reader of Mooncake's published traces (github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSON lines of
`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids of blocks of 512 tokens]}`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from treeline_sim.model.text import Text, random_tokens
from treeline_sim.routers import TraceRequest

BLOCK_TOKENS = 512
MOST_TOKENS = 4_000_000


class TraceError(ValueError):
    """A trace file is invalid; the message names the line."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path, block_size: int, seed: int, speedup: float = 1.0) -> Iterator[TraceRequest]:
    """Yield the requests of a file, `speedup` times as fast. Raises TraceError for an invalid line, and OSError."""
    rng = random.Random(f"outputs {seed}")
    decoder = msgspec.json.Decoder(_Line)
    before = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise TraceError(f"{path.name}, line {number}: {error}") from None
            at = found.timestamp / 1000 / speedup
            tokens = found.input_length
            if not 0 < tokens <= min(MOST_TOKENS, len(found.hash_ids) * BLOCK_TOKENS) or found.output_length < 1:
                raise TraceError(
                    f"{path.name}, line {number}: {tokens} tokens in {len(found.hash_ids)} blocks of {BLOCK_TOKENS}, "
                    f"{found.output_length} out"
                )
            if at < before:
                raise TraceError(f"{path.name}, line {number}: it comes before the line before it")
            before = at
            raw = b"".join(map(_block, found.hash_ids))[: 2 * tokens]
            prompt = Text(block_size, raw)
            yield TraceRequest(at, prompt, prompt.extended(found.output_length, rng), found.output_length)


@lru_cache(maxsize=1 << 16)
def _block(number: int) -> bytes:
    return random_tokens(BLOCK_TOKENS, random.Random(f"block {number}"))
