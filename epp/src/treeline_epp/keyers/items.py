"""Images and the like in keys and KV events: how many tokens each has, learnt from the events of engines.

A request carries an item's bytes, so its digest is known at once; the number of its tokens is the processor's result,
and only engines know it. Our runtime's events spell it in their token ids (`treeline_wire.media`). vLLM's have the
placeholder's id instead, and name the item beside them, by the `uuid` that the picker put into the request's body: the
item's digest. Until a count is known, the key of a request ends with its item.

An engine may spell any count: a wrong one leads requests to a key that nobody has, until an event says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from treeline_wire.keys import PrefixKeys, with_item_keys
from treeline_wire.media import DIGEST_BYTES, FIRST_ID, Item, MediaSpec, counts_in, digest_of, item_ids

from treeline_epp.keyers.base import Content

MAX_TOKENS: Final = 1 << 16
"""More than any processor makes of an item; larger counts are not believed."""
MAX_COUNTS: Final = 1 << 15
"""Most items whose count is remembered, some 7 MB; the ones that were seen longest ago are forgotten."""


class Items:
    """The items of one model: their names in its prompts, and their counts. Written and read by the event loop."""

    def __init__(self, keys: PrefixKeys, spec: MediaSpec) -> None:
        self._processor = spec.fingerprint
        escapes = {keys.prompt_key(text, False): kind for kind, text in spec.placeholders.items()}
        self._placeholders = {key: kind for key, kind in escapes.items() if len(key) == 5 and key[0] == 0xFF}
        self.placeholder_ids = frozenset(int.from_bytes(key[1:], "big") for key in self._placeholders)
        self._counts: dict[bytes, int] = {}

    def named(self, contents: Sequence[Content]) -> list[Item]:
        """Return the items of these contents, with the counts that are known."""
        digests = [(content.kind, digest_of(content.kind, content.sha256, self._processor)) for content in contents]
        return [Item(kind, digest, self.count(digest) or 0) for kind, digest in digests]

    def with_items(self, key: bytes, items: Sequence[Item]) -> bytes:
        """Return the key of a prompt with these items, up to the first of an unknown count."""
        return with_item_keys(key, self._placeholders, items)

    def count(self, digest: bytes) -> int | None:
        """Return the number of an item's tokens, if it is known."""
        known = self._counts.get(digest)
        if known is not None:
            self.learn(digest, known)
        return known

    def learn(self, digest: bytes, count: int) -> None:
        """Remember a count, for longer than those that were seen before."""
        if not 0 < count <= MAX_TOKENS:
            return
        self._counts.pop(digest, None)
        self._counts[digest] = count
        if len(self._counts) > MAX_COUNTS:
            del self._counts[next(iter(self._counts))]


MAX_HELD: Final = 8
MAX_HELD_TOKENS: Final = 1 << 15
"""Most events of a publisher that wait for the next one of their chain, and most tokens of one."""


class ItemEvents:
    """Reads one publisher's events: learns counts, and spells the items of vLLM's as our runtime does.

    A chunk of a prompt may end inside an item whose count is unknown: its event waits for the next one of the chain.
    """

    def __init__(self, items: Items) -> None:
        self._items = items
        self._held: dict[int, BlockStored] = {}  # by their last block

    def read(self, event: Event) -> Event | None:
        """Return an event as the index takes it; None if it waits. O(tokens)."""
        if type(event) is not BlockStored:
            self._forget(event)
        elif event.extra_keys is not None:
            return self._spelled(event)
        elif event.token_ids and max(event.token_ids) >= FIRST_ID:
            for digest, count in counts_in(event.token_ids).items():
                self._items.learn(digest, count)
        return event

    def clear(self) -> None:
        """Forget all waiting events: those of another process follow."""
        self._held.clear()

    def _forget(self, event: Event) -> None:
        """Forget waiting events of which blocks are removed: their descendants will not be found."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif self._held and isinstance(event, BlockRemoved):
            gone = set(event.block_hashes)
            self._held = {last: held for last, held in self._held.items() if gone.isdisjoint(held.block_hashes)}

    def _spelled(self, event: BlockStored) -> BlockStored | None:
        """Return an event of vLLM with the items' ids in the place of their placeholders."""
        held = self._held.pop(event.parent_block_hash, None) if event.parent_block_hash is not None else None
        if held is not None:
            event = _joined(held, event)
        starts = _starts(event)
        if not starts or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return event
        tokens, pads = list(event.token_ids), self._items.placeholder_ids
        for start, digest in starts.items():
            begin = end = max(0, start)
            while end < len(tokens) and tokens[end] in pads and (end == begin or end not in starts):
                end += 1
            count = end - start
            if end == len(tokens):
                known = self._items.count(digest)
                if known is None:
                    self._hold(event)
                    return None
                count = max(count, known)
            if begin == end or count > MAX_TOKENS:
                return event  # not in a form that we know
            if end < len(tokens):
                self._items.learn(digest, count)
            tokens[begin:end] = item_ids(digest, count)[begin - start : end - start]
        rest = [[key for key in _listed(keys) if _digest(key) is None] or None for keys in event.extra_keys or ()]
        return replace(event, token_ids=tokens, extra_keys=rest)

    def _hold(self, event: BlockStored) -> None:
        if event.block_hashes and len(event.token_ids) <= MAX_HELD_TOKENS:
            self._held[event.block_hashes[-1]] = event
            if len(self._held) > MAX_HELD:
                del self._held[next(iter(self._held))]


def _starts(event: BlockStored) -> dict[int, bytes]:
    """Return the items of an event's blocks: where each begins (before the event: less than 0), and its digest."""
    found = {}
    for at, keys in enumerate(event.extra_keys or ()):
        for key in _listed(keys):
            if (digest := _digest(key)) is not None:
                found[at * event.block_size + key[1]] = digest
    return found


def _listed(keys: Any) -> Sequence[Any]:
    return keys if isinstance(keys, list | tuple) else ()


def _digest(key: Any) -> bytes | None:
    """Return the digest in vLLM's pair of an item's identifier and its offset, if the picker named the item."""
    if not isinstance(key, list | tuple) or len(key) != 2 or type(key[1]) is not int or not isinstance(key[0], str):
        return None
    try:
        digest = bytes.fromhex(key[0])
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


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
