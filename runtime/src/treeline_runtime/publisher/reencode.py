"""Does encoding a sequence's text give its tokens back?"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

CUT_TOKENS = 3
"""A UTF-8 character has at most 4 bytes, so at most 3 tokens at the end can hold an unfinished one."""


class TokenizerReencoder:
    """Re-encodes from the last special token before the sampled ones: tokenizers split there first, so the text before
    it cannot change the tokens after it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._splits = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def agreed_len(self, ids: Sequence[int], sampled_from: int) -> int:
        start = next((i for i in range(sampled_from - 1, -1, -1) if ids[i] in self._splits), 0)
        part = list(ids[start:])
        whole, text = self._finished(part)
        again = self._tokenizer.encode(text, add_special_tokens=False).ids
        agreed = _common_len(whole, again)
        if agreed == len(whole):
            return len(ids)  # an unfinished character at the end is given the benefit of the doubt
        return max(start + agreed, sampled_from)

    def _finished(self, part: list[int]) -> tuple[list[int], str]:
        """`part` without the tokens of a character that is not finished yet, and its text."""
        text = self._tokenizer.decode(part, skip_special_tokens=False)
        for cut in range(1, min(CUT_TOKENS, len(part) - 1) + 1):
            if not text.endswith("\ufffd"):
                break
            shorter = part[:-cut]
            text_of_shorter = self._tokenizer.decode(shorter, skip_special_tokens=False)
            if not text_of_shorter.endswith("\ufffd"):
                return shorter, text_of_shorter
        return part, text


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
