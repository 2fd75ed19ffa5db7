"""Text → token ids with a cache: of a growing conversation only the newest turns are tokenized.

An added token (`<|im_start|>`) is found before anything else, and the text between two is tokenized by itself. So a
text can be cut where such a token begins, and the pieces' ids are those of the whole
(`tests/runtime/server/test_tokenization.py` checks it for every kind of tokenizer). A piece keeps its first added
token, since some tokenizers treat the beginning of a text differently.
"""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections import OrderedDict

from tokenizers import Tokenizer
from treeline_wire.added_tokens import AddedToken, AddedTokens
from treeline_wire.normalization import identity

LEAST_CHARS = 512
"""Shorter texts are tokenized at once; pieces, except the last, have at least this length."""
CACHE_BYTES = 32 << 20
_ENTRY_BYTES = 250
"""Bytes of a cache entry besides text and ids."""


class CachedTokenizer:
    """Encodes as `tokenizer` does. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str, capacity_bytes: int = CACHE_BYTES) -> None:
        """`tokenizer_json`: the tokenizer's file. `capacity_bytes`: of the cache."""
        self._tokenizer = tokenizer
        added = [AddedToken.from_spec(spec) for spec in json.loads(tokenizer_json).get("added_tokens") or ()]
        self._added = AddedTokens(added, identity)
        self._frame = self._frame_of()
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._known: OrderedDict[tuple[str | None, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool, namespace: str | None = None) -> list[int]:
        """A text's ids. Caches are per namespace."""
        places = [] if len(text) < LEAST_CHARS else self._added.boundaries(text)
        if not places or (add_special_tokens and self._frame is None):
            return self._encode([text], add_special_tokens)[0]
        pieces = self._cut(text, places)
        found = self._look_up(namespace, pieces)
        missing = [i for i, ids in enumerate(found) if ids is None]
        for i, ids in zip(missing, self._encode([pieces[i] for i in missing], False), strict=True):
            found[i] = ids
            if i < len(pieces) - 1:  # the last one will be longer next time
                self._remember(namespace, pieces[i], ids)
        head, tail = self._frame if add_special_tokens and self._frame is not None else ([], [])
        return [*head, *(id for ids in found for id in ids or ()), *tail]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # Several times faster than `encode`, which also keeps track of where each token was in the text.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens) if texts else []
        return [encoding.ids for encoding in encodings]

    def _cut(self, text: str, places: list[int]) -> list[str]:
        """Cuts from the left, so that a text's pieces are the first pieces of every continuation."""
        starts = [0]
        for place in places:
            if place - starts[-1] >= LEAST_CHARS:
                starts.append(place)
        return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _look_up(self, namespace: str | None, pieces: list[str]) -> list[list[int] | array[int] | None]:
        found: list[list[int] | array[int] | None] = []
        with self._lock:
            for piece in pieces:
                ids = self._known.get((namespace, piece))
                if ids is not None:
                    self._known.move_to_end((namespace, piece))
                found.append(ids)
        return found

    def _remember(self, namespace: str | None, piece: str, ids: list[int]) -> None:
        kept = array("I", ids)
        size = _size(piece, kept)
        if size > self._capacity_bytes // 4:
            return
        with self._lock:
            if (namespace, piece) in self._known:
                return
            self._known[namespace, piece] = kept
            self._bytes += size
            while self._bytes > self._capacity_bytes:
                (_, oldest), ids_of_it = self._known.popitem(last=False)
                self._bytes -= _size(oldest, ids_of_it)

    def _frame_of(self) -> tuple[list[int], list[int]] | None:
        """Finds the tokens that the tokenizer adds before and after every text; None if that is not clear."""
        frames = []
        for probe in ("a", "b c"):
            (plain,), (whole,) = self._encode([probe], False), self._encode([probe], True)
            extra = len(whole) - len(plain)
            frames.append(
                [
                    (whole[:at], whole[at + len(plain) :])
                    for at in range(extra + 1)
                    if whole[at : at + len(plain)] == plain
                ]
            )
        common = [frame for frame in frames[0] if frame in frames[1]]
        return common[0] if len(common) == 1 else None


def _size(piece: str, ids: array[int]) -> int:
    return sys.getsizeof(piece) + ids.itemsize * len(ids) + _ENTRY_BYTES
