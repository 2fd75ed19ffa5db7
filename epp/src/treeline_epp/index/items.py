"""Images and the like in keys: how many tokens each has, and what vLLM calls it, learnt from the events of engines.

A request carries an item's bytes, so its digest is known at once; the number of its tokens is the processor's result,
and only engines know it, unless all of a model's items have as many. Until a count is known, the key of a request ends
with its item. Our runtime's events spell digest and count in their token ids (`treeline_wire.media`). vLLM's name an
item by a hash of its own, of decoded pixels: so a request's items are expected at the endpoint that it was sent to, and
an unknown name between two texts is the only item that is expected there between them (`kvevents.item_events`).

An engine may say anything: wrong counts and names lead requests to keys that nobody has, until an event says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from treeline_wire.keys import ESCAPE_BYTES, PrefixKeys, item_key, split_at
from treeline_wire.media import MediaSpec, digest_of

K = TypeVar("K", bytes, str)
V = TypeVar("V")
MAX_TOKENS: Final = 1 << 16
"""More than any processor makes of an item; larger counts are not believed."""
MAX_ITEM_BYTES: Final = 1 << 20
"""Most bytes of all items of a key: some 200,000 tokens."""
MAX_KNOWN: Final = 1 << 15
"""Most items that are remembered, some 7 MB of counts and as much of names."""
MAX_EXPECTED: Final = 4096
EXPECTED_S: Final = 30.0
"""Most items that are expected at all endpoints, and how long: a prompt may wait so long until it is computed."""
BESIDE: Final = 256
"""Bytes of a key beside an item, by which it is recognized."""
ITEM_TOKENS: Final = 1024
"""An estimate for an item whose count is unknown."""


class Content(NamedTuple):
    """The content of an item in a request: its kind, and the SHA-256 of its bytes in base64."""

    kind: str
    sha256: bytes


class Expected(NamedTuple):
    """An item of a request, the end of the key before it (with earlier items as of unknown counts), and the beginning
    of that after it, up to the next item.
    """

    digest: bytes
    before: bytes
    after: bytes


class Placed(NamedTuple):
    """The key of a prompt with its items: all of it (`complete`), or up to the first of an unknown count. `tokens` are
    those of its items, known or estimated; `expected` those of unknown counts.
    """

    key: bytes
    tokens: int
    complete: bool
    expected: list[Expected]


class Items:
    """The items of one model: their names in its prompts, and their counts. Written and read by the event loop."""

    def __init__(self, keys: PrefixKeys, spec: MediaSpec) -> None:
        self.keys = keys
        self._processor, self.expanded = spec.fingerprint, spec.expanded
        self._fixed = spec.counts
        escapes = {keys.prompt_key(text, False): kind for kind, text in spec.placeholders.items()}
        self._placeholders = {key: kind for key, kind in escapes.items() if len(key) == ESCAPE_BYTES}
        self.placeholder_ids = frozenset(int.from_bytes(key[1:], "big") for key in self._placeholders)
        self._counts: dict[bytes, int] = {}
        self._names: dict[str, bytes] = {}
        self._expected: deque[tuple[float, str, Expected]] = deque(maxlen=MAX_EXPECTED)

    def placed(self, key: bytes, contents: Sequence[Content]) -> Placed:
        """Put the items of these contents in the places of a key's placeholders; the key ends before a placeholder
        without an item, or with one that is too large. O(bytes of the result) at memory speed.
        """
        texts, kinds = split_at(key, self._placeholders)
        parts, expected, tokens, room = [texts[0]], list[Expected](), 0, MAX_ITEM_BYTES
        before, goes_on = texts[0], True
        for number, (kind, sha256) in enumerate(contents):
            digest = digest_of(kind, sha256, self._processor)
            learnt = self.count(digest) or 0
            count = learnt or self._fixed.get(kind, 0)
            tokens += count or ITEM_TOKENS
            room -= ESCAPE_BYTES * count
            if number >= len(kinds) or kinds[number] != kind or room < 0:
                goes_on = False
                continue
            after = texts[number + 1]
            if not learnt:  # though it may be known how many tokens it has, what vLLM calls it is not
                expected.append(Expected(digest, before[-BESIDE:], after[:BESIDE]))
            before = before[-BESIDE:] + item_key(digest, 0) + after
            if goes_on:
                parts += [item_key(digest, count), after if count else b""]
                goes_on = count > 0
        return Placed(b"".join(parts), tokens, goes_on and len(kinds) == len(contents), expected)

    def count(self, digest: bytes) -> int | None:
        """Return the number of an item's tokens, if it is known."""
        known = self._counts.get(digest)
        if known is not None:
            _keep(self._counts, digest, known)
        return known

    def learn(self, digest: bytes, count: int) -> None:
        """Remember a count; the items that were not used for longest are forgotten."""
        if 0 < count <= MAX_TOKENS:
            _keep(self._counts, digest, count)

    def expect(self, items: Sequence[Expected], endpoint: str, now: float) -> None:
        """Expect a request's items in the events of the endpoint that it goes to."""
        waiting = self._expected
        while waiting and waiting[0][0] < now - EXPECTED_S:
            waiting.popleft()
        waiting.extend((now, endpoint, item) for item in items)

    def named(self, name: str) -> bytes | None:
        """Return the digest of the item with this name, if it is known."""
        return self._names.get(name)

    def recognize(self, endpoint: str, name: str, before: bytes, after: bytes) -> bytes | None:
        """Return the digest of the only item that is expected at an endpoint between the end of one key and the
        beginning of another, and remember its name. O(expected items).
        """
        before, after = before[-BESIDE:], after[:BESIDE]
        fits = {
            item.digest
            for _, where, item in self._expected
            if where == endpoint
            and item.before.endswith(before)
            and (item.after.startswith(after) or after.startswith(item.after))
        }
        if len(fits) != 1:
            return None
        digest = fits.pop()
        _keep(self._names, name, digest)
        rest = (one for one in self._expected if one[2].digest != digest)
        self._expected = deque(rest, MAX_EXPECTED)
        return digest


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Make this the newest entry; beyond the bound the oldest goes."""
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_KNOWN:
        del known[next(iter(known))]
