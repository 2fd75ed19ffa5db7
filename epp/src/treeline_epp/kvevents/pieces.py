"""Large KV events in pieces, so that an engine that drops a hundred thousand blocks at once holds up nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

STORED: Final = 128
REMOVED: Final = 32
"""Blocks of a piece."""
_TOKENS: Final = 4096
"""Of a piece, unless one block has more."""
_MOST_TOKENS: Final = 16_384
"""Of a block; hybrid models have some thousand. The text of one with more is not made."""


def in_pieces(events: Sequence[Event]) -> list[Event]:
    """Events that do together what these do, each of a bounded size. O(blocks).

    What a clear makes pointless is left out: an engine may send any number of them at once, and each takes a bit.
    """
    cleared = max((at for at, event in enumerate(events) if type(event) is AllBlocksCleared), default=0)
    return [piece for event in events[cleared:] for piece in pieces(event)]


def pieces(event: Event) -> Iterable[Event]:
    """Events of a bounded size that do together what this one does; itself if it is small. O(blocks)."""
    if isinstance(event, AllBlocksCleared):
        return (event,)
    if isinstance(event, BlockRemoved):
        return (event,) if len(event.block_hashes) <= REMOVED else _removed(event)
    if len(event.block_hashes) <= STORED and len(event.token_ids) <= _TOKENS:
        return (event,)
    return _stored(event)


def _removed(event: BlockRemoved) -> Iterator[Event]:
    hashes, copies = event.block_hashes, event.remaining_copy_counts
    if copies is not None and len(copies) != len(hashes):
        copies = None  # as the index has it
    # What is removed in the order of its chain or in the opposite one is so in each piece, too.
    for at in range(0, len(hashes), REMOVED):
        some = copies[at : at + REMOVED] if copies is not None else None
        yield replace(event, block_hashes=hashes[at : at + REMOVED], remaining_copy_counts=some)


def _stored(event: BlockStored) -> Iterator[Event]:
    hashes, tokens, width, extra = event.block_hashes, event.token_ids, event.block_size, event.extra_keys
    told = 0 < width <= _MOST_TOKENS and len(tokens) == len(hashes) * width
    if not told or (extra is not None and len(extra) != len(hashes)):
        # It does not say what belongs to which block: only blocks that are known already are found by their hashes.
        tokens, extra = [], None
    count = min(STORED, max(1, _TOKENS // width)) if tokens else STORED
    parent = event.parent_block_hash
    for at in range(0, len(hashes), count):
        yield replace(
            event,
            block_hashes=hashes[at : at + count],
            parent_block_hash=parent,
            token_ids=tokens[at * width : (at + count) * width],
            extra_keys=extra[at : at + count] if extra is not None else None,
        )
        parent = hashes[min(at + count, len(hashes)) - 1]
