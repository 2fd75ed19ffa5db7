"""Large KV events in pieces, so that an engine that drops a hundred thousand blocks at once holds up nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

PIECE: Final = 512
"""Blocks: removed in no order they cost 20 µs each, stored ones 1 to 4."""


def pieces(event: Event) -> Iterator[Event]:
    """Events of at most `PIECE` blocks that do together what this one does; itself if it is small, or if its members
    do not say what belongs to which block. O(blocks)."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= PIECE:
        yield event
    elif isinstance(event, BlockRemoved):
        yield from _removed(event)
    else:
        yield from _stored(event)


def _removed(event: BlockRemoved) -> Iterator[Event]:
    hashes, copies = event.block_hashes, event.remaining_copy_counts
    if copies is not None and len(copies) != len(hashes):
        copies = None  # as the index has it
    # What is removed in the order of its chain or in the opposite one is so in each piece, too.
    for at in range(0, len(hashes), PIECE):
        some = copies[at : at + PIECE] if copies is not None else None
        yield msgspec.structs.replace(event, block_hashes=hashes[at : at + PIECE], remaining_copy_counts=some)


def _stored(event: BlockStored) -> Iterator[Event]:
    hashes, tokens, width, extra = event.block_hashes, event.token_ids, event.block_size, event.extra_keys
    if not width or len(tokens) != len(hashes) * width or (extra is not None and len(extra) != len(hashes)):
        yield event
        return
    parent = event.parent_block_hash
    for at in range(0, len(hashes), PIECE):
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[at : at + PIECE],
            parent_block_hash=parent,
            token_ids=tokens[at * width : (at + PIECE) * width],
            extra_keys=extra[at : at + PIECE] if extra is not None else None,
            lookahead_token_ids=None,  # nobody reads them
        )
        parent = hashes[min(at + PIECE, len(hashes)) - 1]
