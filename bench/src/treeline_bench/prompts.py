"""Prompts of an exact length in tokens, made with the model's own tokenizer."""

from __future__ import annotations

import random
import re
from pathlib import Path

from tokenizers import Tokenizer

_WORD = re.compile(r" [a-z]{2,}")
_SPACES = re.compile("[Ġ▁]")
"""The characters with which byte-level and SentencePiece tokenizers write a space."""
MIN_WORDS = 64


class PromptError(ValueError):
    """The tokenizer does not allow prompts of exact length; the message says why."""


class PromptMaker:
    """Builds text from words that are one token each everywhere.

    Pre-tokenizers treat such words (a space, then lower-case letters) as units, so counts add up and cuts between words
    are cuts between tokens. What a tokenizer adds to every prompt (BOS, a leading space) is not counted. Every text is
    encoded again before it is returned, and a wrong count raises.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises PromptError if the vocabulary has fewer than `MIN_WORDS` such words. O(vocabulary)."""
        self.tokenizer = tokenizer
        candidates = sorted(
            text
            for token in range(tokenizer.get_vocab_size(with_added_tokens=False))
            if _WORD.fullmatch(text := _SPACES.sub(" ", tokenizer.id_to_token(token) or ""))
        )
        self._overhead = min((self.count(word) - 1 for word in candidates[:MIN_WORDS]), default=0)
        self.words = [word for word in candidates if self.count(word * 2) - self._overhead == 2]
        if len(self.words) < MIN_WORDS:
            raise PromptError(f"the vocabulary has {len(self.words)} words of one token; {MIN_WORDS} are needed")

    @classmethod
    def of_model(cls, folder: Path) -> PromptMaker:
        """For the checkpoint in `folder`. Raises PromptError when it has no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise PromptError(f"{folder.name} has no tokenizer.json")
        return cls(Tokenizer.from_file(str(path)))

    def count(self, text: str) -> int:
        """Tokens of `text` as a completion request, with special tokens."""
        return len(self.tokenizer.encode(text).ids)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Random words of `tokens` tokens, besides what the tokenizer adds."""
        text = "".join(rng.choices(self.words, k=tokens))
        found = self.count(text) - self._overhead
        if found != tokens:
            raise PromptError(f"wanted {tokens} tokens, the tokenizer makes {found}")
        return text
