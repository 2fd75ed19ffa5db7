"""Random outputs of a grammar, token by token, and vocabularies to walk over."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from treeline_runtime.grammar.backend import Compiled, GrammarBackend, Matcher
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_wire.tokenizer import TokenizerBundle

TINY = Path(__file__).parents[2] / "models/tiny"


def tiny_vocabulary() -> Vocabulary:
    """Return the vocabulary of the repository's own model: byte-level BPE, a few thousand tokens."""
    bundle = TokenizerBundle.build((TINY / "tokenizer.json").read_text(), chat_template=None)
    ids = Vocabulary.of(bundle, 1 << 20, ())
    size = max(i for i, text in enumerate(ids.texts) if text) + 2
    return Vocabulary.of(bundle, size, (size - 1,))


def synthetic_vocabulary(size: int, seed: int = 1) -> Vocabulary:
    """Return a vocabulary of bytes, digits, letters, and longer texts that straddle quotes, colons, brackets and
    characters of several bytes. Its last token ends an output."""
    draw = random.Random(seed)
    texts = {bytes([i]) for i in range(256)}
    pieces = [
        '"', '": ', '", "', "{", "}", "}, ", "[", "]", ": ", ", ", "é", "日", "本", "😀", "\\", "\\u00", "null", "true",
        "-", ".", "e+", "\n",
    ]  # fmt: skip
    while len(texts) < size - 1:
        parts = [draw.choice(pieces) if draw.random() < 0.4 else _word(draw) for _ in range(draw.randint(1, 3))]
        text = "".join(parts).encode()
        start = draw.choice([0, 0, 0, 1]) if len(text) > 2 else 0
        texts.add(text[start : start + 16])
    return Vocabulary([*sorted(texts), b""], {}, (size - 1,))


def _word(draw: random.Random) -> str:
    return "".join(
        draw.choices(draw.choice([string.ascii_lowercase, string.digits, string.ascii_letters]), k=draw.randint(1, 6))
    )


@dataclass
class Walk:
    """text: of the tokens; whole: the grammar allowed an end there."""

    text: bytes
    tokens: list[int]
    whole: bool


class Walker:
    """Random walks over one vocabulary. After `length` tokens they look for an end: first closing tokens, then
    quotes."""

    def __init__(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self._texts = vocabulary.texts
        self._stop = vocabulary.stop_ids[0]
        size = len(vocabulary.texts)
        self.mask = torch.zeros((1, (size + 31) // 32), dtype=torch.int32)
        self._bytes = self.mask.numpy().view(np.uint8)[0]
        self._closing = np.array([_closing(text) for text in vocabulary.texts])
        self._size = size

    def allowed(self, matcher: Matcher) -> np.ndarray:
        """Return the tokens of the mask."""
        self._backend.fill([matcher], self.mask, [0])
        return np.flatnonzero(np.unpackbits(self._bytes, bitorder="little")[: self._size])

    def walk(self, compiled: Compiled, seed: int, length: int, most: int, probe: float = 0.2) -> Walk:
        """Walk up to `most` tokens. Raises AssertionError for an empty mask, or one that `accept` contradicts."""
        draw = random.Random(seed)
        matcher = compiled.matcher([self._stop])
        tokens: list[int] = []
        while len(tokens) < most:
            allowed = self.allowed(matcher)
            if matcher.gave_up:  # the step took too much: such an output is ended with an error
                break
            assert len(allowed), f"nothing may follow {self._text(tokens)!r}"
            assert (allowed[-1] == self._stop) == matcher.completed
            if draw.random() < probe:
                self._probe(matcher, allowed, draw, tokens)
            token = self._choose(allowed, draw, len(tokens) >= length)
            assert matcher.accept(token), (
                f"{self._texts[token]!r} is in the mask, but not accepted after {self._text(tokens)!r}"
            )
            if token == self._stop:
                return Walk(self._text(tokens), tokens, whole=True)
            tokens.append(token)
        return Walk(self._text(tokens), tokens, whole=False)

    def _choose(self, allowed: np.ndarray, draw: random.Random, ending: bool) -> int:
        if draw.random() < (0.8 if ending else 0.1):
            ranks = self._closing[allowed]
            allowed = allowed[ranks == ranks.max()]
        elif allowed[-1] == self._stop and draw.random() < 0.2:
            return self._stop
        return int(allowed[draw.randrange(len(allowed))])

    def _probe(self, matcher: Matcher, allowed: np.ndarray, draw: random.Random, tokens: list[int]) -> None:
        """Check that a token of the mask is accepted and can be rolled back, and that another one is not accepted."""
        inside = int(allowed[draw.randrange(len(allowed))])
        assert matcher.accept(inside), (
            f"{self._texts[inside]!r} is in the mask, but not accepted after {self._text(tokens)!r}"
        )
        matcher.rollback(1)
        outside = draw.randrange(self._size)
        if self._texts[outside] and outside not in allowed:
            assert not matcher.accept(outside), (
                f"{self._texts[outside]!r} is not in the mask after {self._text(tokens)!r}"
            )

    def _text(self, tokens: list[int]) -> bytes:
        return b"".join(self._texts[token] for token in tokens)


def _closing(text: bytes) -> int:
    """Rank a token by how far it brings an output to its end. Closing a string ranks as high as closing an object."""
    if not text:
        return 9
    if text in (b"}", b"]", b'"', b'"}', b'"]'):
        return 8
    ranks = {b": ": 5, b'": ': 5, b", ": 5, b"null": 4, b"0": 3, b"1": 2}
    return ranks.get(text, 1 if len(text) == 1 else 0)
