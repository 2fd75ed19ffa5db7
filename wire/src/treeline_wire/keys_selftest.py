"""Checks `block_key(encode(text)) == prompt_key(text)` on texts that have broken it before."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import tokenizers

_ADDED_TRIED: Final = 48
_OF_A_CATEGORY: Final = 24
"""How many characters of each Unicode general category are tried."""

_TEXTS: Final = (
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "a  b   c    d",
    "\n",
    "\na\n\n\nb\r\n\tc \n d",
    "Hello, world! It's 12345.67 o'clock; we'll see ... (x=[{}])",
    "def f(x):\n    return x ** 2  # squared\n\n\n",
    "ÀÉÎõü ñ ß Œ ſ İı ÅÅ Å ﬁ ½ ² ™ ，（）！＜ＡＢＣ＞",
    "e\u0301 e\u0323\u0302 e\u0302\u0323 \u1100\u1161\u11a8 \u0958 \u0345\u0316",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία ἀρχῇ",
    "工欲善其事,必先利其器。「你好」3.14",
    "いろはにほへと ガギグゲゴ ｶﾞｷﾞ 가나다라",
    "مرحبا بالعالم ١٢٣ שָׁלוֹם עולם",
    "नमस्ते दुनिया ৰ্ক தமிழ் ไทย ကမ္ဘာ ខ្មែរ",
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ☃️ 𝕳𝖊𝖑𝖑𝖔 𠜎𠜱",
    "\x00\x01\x07\x08\x0b\x0c\x1b\x1c\x1f\x7f\x80\x85\x9f",
    "\u00a0\u00ad\u200b\u200c\u200d\u2028\u2029\u202e\u3000\ufeff\ufffd\uffff\ue000",
    "▁ ▁▁a ▁b Ġ Ċ <0x41> <0xE2><0x96> ## </w> @@",
    "<s></s><unk><pad> <|endoftext|> <|im_start|>user\n [INST] <bos>",
    "ab" * 200 + "\n" * 50 + " " * 100 + "z",
)


class KeySelfTestError(ValueError):
    """The tokenizer does not keep the property; its publishers are matched by hashes or history."""


class Keys(Protocol):
    """The keys under test."""

    def prompt_key(self, text: str, add_special_tokens: bool) -> bytes: ...
    def block_key(self, ids: Sequence[int]) -> bytes: ...


def run(keys: Keys, tokenizer: tokenizers.Tokenizer, added: Sequence[str], *, every_category: bool = False) -> None:
    """Checks all texts, and the added tokens between words, spaces and each other. Raises `KeySelfTestError`.

    `every_category`: also tries characters of every general category in many combinations, for tokenizers that keep
    only what a pattern matches.
    """
    for text in (*_TEXTS, *_with_added(added), *(_of_every_category() if every_category else ())):
        for add_special_tokens in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            want, got = keys.block_key(ids), keys.prompt_key(text, add_special_tokens)
            if want != got:
                at = next(
                    (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
                    min(len(want), len(got)),
                )
                raise KeySelfTestError(
                    f"the tokens of {text[:60]!r} stand for {want[at : at + 16]!r} at byte {at}, "
                    f"the text itself for {got[at : at + 16]!r}"
                )


def _with_added(added: Sequence[str]) -> Iterable[str]:
    stride = max(1, len(added) // _ADDED_TRIED)
    tried = added[::stride]
    for token in tried:
        yield token
        yield f"a{token}b {token} c\n{token}\n{token}{token} "
    yield " ".join(tried)
    yield "".join(tried)
    yield "x".join(reversed(tried))


@functools.cache
def _of_every_category() -> tuple[str, ...]:
    """Makes a text for each general category."""
    found: dict[str, list[str]] = {}
    for code in range(0x20000):
        category = unicodedata.category(chr(code))
        if category != "Cs":
            found.setdefault(category, []).append(chr(code))
    texts = []
    for chars in found.values():
        some = chars[:: max(1, len(chars) // _OF_A_CATEGORY)]
        texts += [f"{c}{c}a{c}a1{c}1 {c} {c}\n{c}\n\n{c}'{c}.{c}." for c in some]
    return ("".join(texts), *(text[:1] for text in texts), *texts[::7])
