"""Images and the like in the events of one publisher: their counts are learnt, and vLLM's are spelled as ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from treeline_wire.keys import item_key
from treeline_wire.media import FIRST_ID, counts_in, item_ids

from treeline_epp.index.items import BESIDE, MAX_TOKENS, Items

MAX_HELD: Final = 8
MAX_HELD_TOKENS: Final = 1 << 14
"""Most events that wait for the next one of their chain, and most tokens of one."""


class ItemEvents:
    """Reads the events of an endpoint before the index takes them.

    vLLM's have the placeholder's id for each token of an item, and its name and place beside each block (`extra_keys`).
    A chunk of a prompt may end inside an item whose name or count is unknown: its event waits for the next one of its
    chain.
    """

    def __init__(self, items: Items, endpoint: str) -> None:
        self._items = items
        self._endpoint = endpoint
        self._held: dict[int, BlockStored] = {}  # by their last block

    def read(self, event: Event) -> Event | None:
        """Return an event as the index takes it; None if it waits. O(tokens)."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif isinstance(event, BlockRemoved):
            if self._held:
                gone = set(event.block_hashes)  # descendants of these blocks will not be found
                self._held = {last: held for last, held in self._held.items() if gone.isdisjoint(held.block_hashes)}
        elif event.extra_keys is not None:
            return self._spelled(event)
        elif event.token_ids and max(event.token_ids) >= FIRST_ID:
            for digest, count in counts_in(event.token_ids).items():
                self._items.learn(digest, count)
        return event

    def clear(self) -> None:
        """Forget all waiting events: those of another process follow."""
        self._held.clear()

    def _spelled(self, event: BlockStored) -> BlockStored | None:
        """Return an event of vLLM with the items' ids in the places of their placeholders; as it is if it has unknown
        items.
        """
        held = self._held.pop(event.parent_block_hash, None) if event.parent_block_hash is not None else None
        if held is not None:
            event = _joined(held, event)
        starts = _starts(event)
        if not starts or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return event
        tokens, pads, key_of = list(event.token_ids), self._items.placeholder_ids, self._items.keys.block_key
        before, done = b"", 0
        for start, name in starts.items():
            begin = end = max(0, start)
            while end < len(tokens) and tokens[end] in pads and (end == begin or end not in starts):
                end += 1
            digest = self._items.named(name)
            count = end - start
            if end == len(tokens):
                known = None if digest is None else self._items.count(digest)
                if known is None:
                    self._hold(event)
                    return None
                count = max(count, known)
            if begin == end or count > MAX_TOKENS:
                return event
            before = before[-BESIDE:] + key_of(event.token_ids[done:begin])
            if digest is None:
                stop = next((other for other in starts if other > start), len(tokens))
                digest = self._items.recognize(self._endpoint, name, before, key_of(event.token_ids[end:stop]))
                if digest is None:
                    return event
            before += item_key(digest, 0)
            if end < len(tokens):
                self._items.learn(digest, count)
            tokens[begin:end] = item_ids(digest, count)[begin - start : end - start]
            done = end
        rest = [[key for key in _listed(keys) if not _is_item(key)] or None for keys in event.extra_keys or ()]
        return replace(event, token_ids=tokens, extra_keys=rest)

    def _hold(self, event: BlockStored) -> None:
        if event.block_hashes and len(event.token_ids) <= MAX_HELD_TOKENS:
            self._held[event.block_hashes[-1]] = event
            if len(self._held) > MAX_HELD:
                del self._held[next(iter(self._held))]


def _starts(event: BlockStored) -> dict[int, str]:
    """Return the items of an event's blocks, in order: where each begins (before the event: less than 0), its name."""
    width = event.block_size
    blocks = enumerate(event.extra_keys or ())
    return dict(sorted((at * width + key[1], key[0]) for at, keys in blocks for key in _listed(keys) if _is_item(key)))


def _listed(keys: Any) -> Sequence[Any]:
    return keys if isinstance(keys, list | tuple) else () if keys is None else (keys,)


def _is_item(key: Any) -> bool:
    """Return whether an extra key is an item's name and its offset from the block's beginning."""
    return isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int


def _joined(first: BlockStored, then: BlockStored) -> BlockStored:
    return replace(
        first,
        block_hashes=[*first.block_hashes, *then.block_hashes],
        token_ids=[*first.token_ids, *then.token_ids],
        extra_keys=[*_filled(first), *_filled(then)],
    )


def _filled(event: BlockStored) -> Iterator[Any]:
    """Yield the extra keys of each block; an event may leave out the last ones."""
    extra = event.extra_keys or []
    yield from extra
    yield from [None] * (len(event.block_hashes) - len(extra))
