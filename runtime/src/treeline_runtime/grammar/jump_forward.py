"""Jump-forward decoding: forced text becomes tokens without sampling.

Splitting only the forced text would make token sequences that the model never saw. So the end of the sequence is
tokenized again together with it (Zheng et al., SGLang, section 4: compressed finite state machines). The last tokens
may change; the text does not.

    tokens so far:   … | window, as context | differs   |
    tokenized again:       same             | replaced  | forced … | undecided |

What follows the forced text is unknown and could join its last word, so the last word is left to sampling. A word is
what the tokenizer splits texts into first, so text before it cannot change.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from tokenizers import Tokenizer
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime.grammar.vocabulary import Vocabulary

WINDOW_TOKENS = 12
"""Tokens at the sequence's end that are tokenized again; nearly all words are shorter."""
ENCODED_TEXTS, ENCODED_CHARS = 4096, 512
"""The number and length of cached texts with their tokens: grammars force the same ones repeatedly."""
MAX_FORCED_CHARS = 4096
"""The longest jump; the rest is another jump."""


class Jump(NamedTuple):
    """Replaces the last `take_back` tokens by `append`, which has their text and then the forced text."""

    take_back: int
    append: list[int]

    @property
    def gain(self) -> int:
        return len(self.append) - self.take_back


class _Encoded(NamedTuple):
    """A text as tokens: the byte where each ends, whether a word starts with it, and how many are final."""

    ids: list[int]
    ends: list[int]
    starts_word: list[bool]
    decided: int


class JumpForward:
    """Turns forced text into tokens. One thread uses it."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[bytes], added: dict[int, str]) -> None:
        """texts: all tokens' texts, special ones included. added: tokens found before all others, with their texts;
        nothing joins them."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._hard: Collection[int] = {*added, *(id for id, text in enumerate(texts) if not text)}
        self._begins_added = {text[:n] for text in added.values() for n in range(1, len(text))}
        self._longest_added = max(map(len, added.values()), default=0)
        # of tokenizers without other words, SentencePiece's: a space always begins a token
        self._words_by_space = not any(b" " in text.lstrip(b" ") for id, text in enumerate(texts) if id not in added)
        self._encode = functools.lru_cache(ENCODED_TEXTS)(self._encode_afresh)

    def jump(self, tokens: Sequence[int], fixed: int, forced: str, namespace: str | None = None) -> Jump | None:
        """tokens: the sequence so far; the first `fixed` stay. None: nothing is certain, or not expressible in tokens.
        Caches are per namespace."""
        if not forced:
            return None
        forced = forced[:MAX_FORCED_CHARS]
        start = self._window(tokens)
        hard = start == 0 or tokens[start - 1] in self._hard
        found = self._retokenized(tokens[start:], max(fixed - start, 0), forced, namespace, hard=hard)
        if found is None and start < fixed:  # what may not change would: the forced text begins behind it
            found = self._retokenized(tokens[fixed:], 0, forced, namespace, hard=True)
        return found

    def _window(self, tokens: Sequence[int]) -> int:
        """The window's start: not inside a character, and after the last token that nothing joins."""
        start = max(len(tokens) - WINDOW_TOKENS, 0)
        for i in range(len(tokens) - 1, start - 1, -1):
            if tokens[i] in self._hard:
                return i + 1
        while start < len(tokens) and self._texts[tokens[start]][0] & 0xC0 == 0x80:
            start += 1
        return start

    def _retokenized(
        self, window: Sequence[int], fixed: int, forced: str, namespace: str | None, *, hard: bool
    ) -> Jump | None:
        """hard: whether the text before the window has no effect on it."""
        known = b"".join(self._texts[id] for id in window)
        try:
            text = known.decode() + forced
        except UnicodeDecodeError:  # the sequence ends within a character
            return None
        encoded = self._encode(text, namespace) if len(text) <= ENCODED_CHARS else self._encode_afresh(text)
        made = b"".join(map(self._text, encoded.ids))
        surplus = len(made) - len(text.encode())  # the space that some tokenizers put before every text
        if made != b" " * surplus + text.encode():
            return None
        place = self._first_common(window, encoded, surplus, hard=hard)
        if place is None:
            return None
        i, j = place
        while i < len(window) and j < encoded.decided and window[i] == encoded.ids[j]:
            i, j = i + 1, j + 1
        covered = encoded.ends[encoded.decided - 1] - surplus if encoded.decided else 0
        if i < fixed or covered < len(known) or j >= encoded.decided:
            return None
        return Jump(len(window) - i, encoded.ids[j : encoded.decided])

    def _first_common(
        self, window: Sequence[int], encoded: _Encoded, surplus: int, *, hard: bool
    ) -> tuple[int, int] | None:
        """The first index of window and new tokens from which both have the same text."""
        if hard and surplus == 0:
            return 0, 0
        if hard and encoded.ends[0] == surplus:
            return 0, 1
        starts = {0: 0} | {end: i + 1 for i, end in enumerate(accumulate(len(self._texts[id]) for id in window))}
        for j in range(1, len(encoded.ids)):
            at = encoded.ends[j - 1] - surplus
            if encoded.starts_word[j] and at > 0 and at in starts:
                before, behind = self._text(encoded.ids[j - 1])[-1:], self._text(encoded.ids[j])[:1]
                if not _kind(before) or _kind(before) != _kind(behind):  # where digits are split, those before decide
                    return starts[at], j
        return None

    def _text(self, id: int) -> bytes:
        """The text of a token that the model may lack."""
        return self._texts[id] if id < len(self._texts) else b"\xff"

    def _encode_afresh(self, text: str, _namespace: str | None = None) -> _Encoded:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        words: list[int | None] = encoding.word_ids
        texts = list(map(self._text, ids))
        starts = [True] * len(ids)
        for j in range(1, len(ids)):
            spaced = self._words_by_space and texts[j][:1] == b" " and texts[j - 1][-1:] != b" "
            starts[j] = words[j] != words[j - 1] or spaced
        return _Encoded(ids, list(accumulate(map(len, texts))), starts, self._decided(text, texts, starts))

    def _decided(self, text: str, texts: list[bytes], starts: list[bool]) -> int:
        """Counts the leading tokens that later text cannot change. Not counted: the last word, a last run of spaces or
        digits, and a possible beginning of an added token."""
        decided = len(texts)
        tail, kind = b"", b""
        while decided:
            word_at = decided - 1
            while not starts[word_at]:
                word_at -= 1
            word = b"".join(texts[word_at:decided])
            if kind and _kind(word) != kind:
                break
            decided, tail, kind = word_at, word + tail, _kind(word + tail)
            if not kind:
                break
        begun = self._begun_added(text)
        while decided and len(tail) < begun:
            decided -= 1
            tail = texts[decided] + tail
        return decided

    def _begun_added(self, text: str) -> int:
        for n in range(min(self._longest_added, len(text)), 0, -1):
            if text[-n:] in self._begins_added:
                return len(text[-n:].encode())
        return 0


def _kind(word: bytes) -> bytes:
    """The kind of run whose words are not final."""
    if word.isspace():
        return b" "
    return b"0" if word.strip(b" ").isdigit() else b""


def jump_forward(bundle: TokenizerBundle, vocabulary: Vocabulary) -> JumpForward:
    """For a model's tokenizer; slow."""
    tokenizer: Tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = json.loads(bundle.tokenizer_json).get("added_tokens") or []
    return JumpForward(tokenizer, vocabulary.with_marks(), {token["id"]: token["content"] for token in added})
