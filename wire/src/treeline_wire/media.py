"""Images, videos and sound in prompts: their digests, and the token ids that stand for them.

An item is a run of `count` placeholder tokens in a prompt. In cache keys and KV events their ids spell the item, so
that two items of one size never share pages and the same one does, in runtime and picker alike, without decoding it:

    word 0 | ... | word 7 | count | word 0 | ...

All of these ids are at least `FIRST_ID`, above every vocabulary: the count has its two highest bits set, the eight
words the highest only, and each has 30 bits of the digest. The cycle repeats, so any run of 17 of them names item and
count. A page may end anywhere in an item, so the ids begin with what few other items have; the runtime names a page in
which an item begins by its digest, too, and shares none by a few ids.
"""

from __future__ import annotations

import binascii
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from .errors import PromptError

DIGEST_BYTES: Final = 30
FIRST_ID: Final = 1 << 31
"""The least id of an item's tokens."""
_COUNT: Final = 3 << 30
_LOW: Final = (1 << 30) - 1
_WORDS: Final = 8
MAX_COUNT: Final = _LOW


Kind: TypeAlias = Literal["image", "video", "audio"]


class MediaSpec(Struct, frozen=True):
    """How a model's prompts name items: the text of the placeholder token of each `Kind`, which the chat template
    writes once for an item, and a digest of the files that configure the model's processor.

    `written`: where the chat template writes another text for an item, that text, and what the processor makes of it
    before it is tokenized, with the placeholder once. `counts`: the tokens of an item, where all have as many.
    """

    placeholders: dict[str, str]
    fingerprint: str
    written: dict[str, tuple[str, str]] = {}
    counts: dict[str, int] = {}

    @property
    def in_templates(self) -> dict[str, str]:
        """What the chat template writes for each kind."""
        return self.placeholders | {kind: before for kind, (before, _) in self.written.items()}

    def expanded(self, text: str) -> str:
        """The text of a prompt with items, with their placeholders. O(len(text))."""
        for before, after in self.written.values():
            text = text.replace(before, after)
        return text


class Item(Struct, frozen=True):
    """An item of a prompt: its kind, its identity (`item_digest`), and the number of its tokens."""

    kind: str
    digest: bytes
    count: int


def item_digest(kind: str, data: bytes | bytearray | memoryview, processor: str) -> bytes:
    """The identity of an item: of its bytes as they were sent, and of the processor that reads them (the fingerprint of
    `MediaSpec`). O(len(data)), without holding the interpreter for long data."""
    return digest_of(kind, hashlib.sha256(binascii.b2a_base64(data, newline=False)).digest(), processor)


def digest_of(kind: str, content: bytes, processor: str) -> bytes:
    """The same, from the SHA-256 of the item's bytes in base64: requests carry them in this form, so a picker neither
    decodes them nor needs to know kind and processor first."""
    made = hashlib.sha256(f"{len(kind)}:{kind}{len(processor)}:{processor}".encode())
    made.update(content)
    return made.digest()[:DIGEST_BYTES]


def private_digest(digest: bytes, namespace: str | None) -> bytes:
    """A digest that no other cache namespace has, for what is kept of an item: whether it is there takes a time that
    tells, and namespaces are to know nothing of each other."""
    return digest if namespace is None else hashlib.sha256(namespace.encode() + digest).digest()[:DIGEST_BYTES]


def item_cycle(digest: bytes, count: int) -> list[int]:
    """The ids that repeat over an item's tokens."""
    number = int.from_bytes(digest, "big")
    return [*(FIRST_ID | number >> 30 * (_WORDS - 1 - i) & _LOW for i in range(_WORDS)), _COUNT | count]


def item_ids(digest: bytes, count: int) -> list[int]:
    """The ids of an item's `count` tokens."""
    return list(itertools.islice(itertools.cycle(item_cycle(digest, count)), count))


def counts_in(ids: Sequence[int]) -> dict[bytes, int]:
    """The items of which `ids` has a whole cycle, by digest, with their counts. Ids of a peer may spell anything."""
    found: dict[bytes, int] = {}
    for at in range(_WORDS, len(ids)):
        if ids[at] >= _COUNT and all(FIRST_ID <= word < _COUNT for word in ids[at - _WORDS : at]):
            number = 0
            for word in ids[at - _WORDS : at]:
                number = number << 30 | word & _LOW
            found[number.to_bytes(DIGEST_BYTES, "big")] = ids[at] & _LOW
    return found


def with_items(
    ids: Sequence[int], placeholders: Mapping[int, str], items: Iterable[Item]
) -> tuple[list[int], list[int]]:
    """The ids of a prompt in which each placeholder, given with its kind, became the ids of the next item of its kind;
    and where each item begins, in the order of `items`. Raises `PromptError` unless there are as many placeholders as
    items of each kind: a text may spell a placeholder, too. O(ids)."""
    given = list(items)
    waiting = {kind: [at for at, item in enumerate(given) if item.kind == kind] for kind in placeholders.values()}
    if sum(map(len, waiting.values())) < len(given):
        raise PromptError("messages", f"the model takes no items but {', '.join(sorted(waiting))}")
    out: list[int] = []
    starts = [0] * len(given)
    used = dict.fromkeys(waiting, 0)
    for token in ids:
        kind = placeholders.get(token)
        if kind is None:
            out.append(token)
            continue
        if used[kind] < len(waiting[kind]):
            at = waiting[kind][used[kind]]
            starts[at] = len(out)
            out += item_ids(given[at].digest, given[at].count)
        used[kind] += 1
    for kind, found in used.items():
        if found != len(waiting[kind]):
            raise PromptError(
                "messages", f"the prompt has {found} placeholders for {len(waiting[kind])} items of kind {kind!r}"
            )
    return out, starts
