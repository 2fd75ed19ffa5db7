"""Special tokens taken out of text that was made with them, because a parser had to see them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class SpecialTokens:
    """The texts of a tokenizer's special tokens, of which there may be thousands; made once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        self.beginnings = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self.longest = max(map(len, self.texts), default=0)
        # The shortest first: what is taken out does not depend on what comes later.
        self._sizes = sorted({len(text) for text in self.texts})
        first = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where they are in a text, in order. O(characters x sizes)."""
        behind = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < behind:
                continue
            end = next((start + size for size in self._sizes if text[start : start + size] in self.texts), None)
            if end is not None:
                behind = end
                yield start, end


class Unmarked:
    """A text that comes in pieces, without special tokens. What may become one is held back."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._held = ""

    def feed(self, text: str) -> str:
        special = self._special
        if not special.texts:
            return text
        text, at, kept = self._held + text, 0, list[str]()
        for start, end in special.spans(text):
            kept.append(text[at:start])
            at = end
        longest = min(special.longest - 1, len(text) - at)
        held = next((size for size in range(longest, 0, -1) if text[-size:] in special.beginnings), 0)
        end = len(text) - held
        self._held = text[end:]
        return "".join([*kept, text[at:end]])

    def end(self) -> str:
        """What was held back was no special token."""
        held, self._held = self._held, ""
        return held
