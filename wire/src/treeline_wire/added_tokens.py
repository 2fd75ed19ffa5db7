"""Finds a tokenizer's added tokens in text, exactly as the `tokenizers` library does, with one regular expression.

The library finds tokens that are not to be normalized in the raw text, then the others in each normalized piece between
them; the longest token at a position wins. A token may swallow white space on either side (`lstrip`, `rstrip`) and may
require word boundaries (`single_word`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .normalization import TextTransform, identity

# Unicode's White_Space and word characters as the library's regular expressions know them; Python's differ.
_SPACE: Final = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LEADING_SPACE: Final = re.compile(f"{_SPACE}*")
_SPACES: Final = frozenset(chr(c) for c in range(0x3001) if re.match(_SPACE, chr(c)))
_MAX_GROUPS: Final = 8
_JOINERS: Final = "\u200c\u200d"
_CIRCLED: Final = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))


@dataclass(frozen=True)
class AddedToken:
    """One entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> AddedToken:
        """Reads an entry. Raises KeyError and TypeError for a malformed one."""
        flags = {name: bool(spec.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        return cls(int(spec["id"]), str(spec["content"]), **flags)


class TextSegment(NamedTuple):
    """A part of a text: an added token, or (`token` None) normalized text. `first`: it is at the beginning of the
    text."""

    token: AddedToken | None
    text: str
    first: bool


class AddedTokens:
    """All added tokens of a tokenizer."""

    def __init__(self, tokens: list[AddedToken], normalize: TextTransform) -> None:
        self._normalize = normalize
        self._demanding = any(t.single_word for t in tokens)
        self._raw = _Finder({t.content: t for t in tokens if t.content and not t.normalized})
        later = {normalize(t.content): t for t in tokens if t.content and t.normalized}
        later.pop("", None)
        self._later = _Finder(later) if later else None

    def split(self, text: str) -> list[TextSegment]:
        """Splits a text into added tokens and the normalized text between them. O(len(text)), one or two scans."""
        if not text:
            return []
        if self._later is None and self._raw.absent(text):
            return [TextSegment(None, self._normalize(text), True)]
        segments: list[TextSegment] = []
        for token, start, stop in self._raw.find(text):
            if token is not None:
                segments.append(TextSegment(token, "", start == 0))
                continue
            normal = text[start:stop] if self._normalize is identity else self._normalize(text[start:stop])
            if self._later is None:
                segments.append(TextSegment(None, normal, start == 0))
                continue
            for inner, inner_start, inner_stop in self._later.find(normal):
                part = "" if inner is not None else normal[inner_start:inner_stop]
                segments.append(TextSegment(inner, part, start == 0 and inner_start == 0))
        return segments

    def boundaries(self, text: str) -> list[int]:
        """Returns the positions where added tokens begin that are found before normalization. The text before such a
        position and the text from it on are tokenized independently.

        Empty if a token requires word boundaries, which depend on both sides.
        """
        if self._demanding:
            return []
        places, done = [], 0
        for token, start, stop in self._raw.find(text):
            if token is not None and start >= done:  # else it is white space that the previous token has swallowed
                places.append(start)
            done = stop
        return places


class PlainScan:
    """Finds added tokens without flags in UTF-8 and replaces them by their keys, which is enough for most
    tokenizers.
    """

    def __init__(self, keys: dict[bytes, bytes]) -> None:
        words = [token.decode("latin-1") for token in keys]
        self._keys = keys
        self._groups = [_byte_pattern(group) for group in _by_first_character(words)]
        self._all = _byte_pattern(words)

    def replace(self, text: bytes) -> bytes:
        """Returns the text with each token replaced by its key. O(len(text))."""
        present = [group for group in self._groups if group.search(text) is not None]
        if not present:
            return text
        parts = (present[0] if len(present) == 1 else self._all).split(text)
        keys = self._keys
        parts[1::2] = [keys[part] for part in parts[1::2]]
        return b"".join(parts)


def _by_first_character(words: Iterable[str]) -> list[list[str]]:
    """Groups words by first character: a pattern with one first character skips to it with memchr.

    Many groups no longer pay, so they become one.
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[0], []).append(word)
    return list(groups.values()) if len(groups) <= _MAX_GROUPS else [list(words)]


def _byte_pattern(words: list[str]) -> re.Pattern[bytes]:
    return re.compile(b"(" + any_of(words).encode("latin-1") + b")")


class _Finder:
    """One set of tokens and the expression that finds them, the longest at each place."""

    def __init__(self, tokens: dict[str, AddedToken]) -> None:
        self._tokens = tokens
        self._groups = [re.compile(any_of(words)) for words in _by_first_character(tokens)]
        self._all = re.compile(any_of(list(tokens)))

    def absent(self, text: str) -> bool:
        return not self._present(text)

    def _present(self, text: str) -> list[re.Pattern[str]]:
        return [group for group in self._groups if group.search(text) is not None]

    def find(self, text: str) -> Iterator[tuple[AddedToken | None, int, int]]:
        """Yields (token or None, start, stop) for all of `text`, in order, without empty stretches."""
        done = 0
        present = self._present(text)
        search = present[0] if len(present) == 1 else self._all
        for match in search.finditer(text) if present else ():
            start, stop = match.span()
            token = self._tokens[match.group()]
            if token.single_word and not _is_single_word(text, start, stop):
                continue
            if token.lstrip:
                while start > done and text[start - 1] in _SPACES:
                    start -= 1
            if token.rstrip:
                found = _LEADING_SPACE.match(text, stop)
                stop = found.end() if found else stop
            if done < start:
                yield None, done, start
            yield token, start, stop
            done = stop
        if done < len(text):
            yield None, done, len(text)


def _is_single_word(text: str, start: int, stop: int) -> bool:
    before = start == 0 or not _is_word(text[start - 1])
    return before and (stop == len(text) or not _is_word(text[stop]))


def _is_word(char: str) -> bool:
    category = unicodedata.category(char)
    if category[0] in "LM" or category in ("Nd", "Nl", "Pc") or char in _JOINERS:
        return True
    return any(first <= ord(char) <= last for first, last in _CIRCLED)


def any_of(words: list[str]) -> str:
    """Returns a pattern for the longest of the words that begins at a position.

    It is a trie: matching costs the length of the match, not the number of words, and a common first character lets the
    regex engine skip to it with memchr.
    """
    if not words:
        return "(?!)"
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _trie_pattern(trie)


def _trie_pattern(trie: dict[str, Any]) -> str:
    """Returns the pattern of a trie; iterative, since a token may be longer than Python's stack is deep. Chains of
    single children become plain text.
    """
    branches = []
    for char, child in trie.items():
        if char == "":
            continue
        text = re.escape(char)
        while len(child) == 1 and "" not in child:
            char, child = next(iter(child.items()))
            text += re.escape(char)
        rest = "" if set(child) == {""} else _trie_pattern(child)
        branches.append(text + rest)
    pattern = branches[0] if len(branches) == 1 else "(?:" + "|".join(branches) + ")"
    return f"(?:{pattern})?" if "" in trie else pattern
