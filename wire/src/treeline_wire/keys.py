"""Prefix keys: the bytes by which a prompt is known, with or without tokenizing it.

`block_key(encode(text)) == prompt_key(text)`: see the README. (First version: byte-level BPE.)
"""

import json
import re
import struct
from collections.abc import Sequence
from typing import Any

import tokenizers

from .prompt import Prompt
from .tokenizer import TokenizerBundle


class KeySelfTestError(ValueError):
    """The tokenizer does not hold the property, so its publishers must use hashes or history."""


def escape(token_id: int) -> bytes:
    """The bytes that stand for a special or added token: 0xFF, which no UTF-8 contains, and its id."""
    return b"\xff" + struct.pack(">I", token_id)


def _byte_chars() -> dict[str, int]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in kept}
    rest = [b for b in range(256) if b not in set(kept)]
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


class PrefixKeys:
    """Keys for one tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        self._spec: dict[str, Any] = json.loads(tokenizer_json)
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = {t["id"]: t["content"] for t in self._spec.get("added_tokens", [])}
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        table = _byte_chars()
        size = max(vocab.values(), default=-1) + 1
        self.token_bytes: list[bytes] = [escape(i) for i in range(size)]
        for token, i in vocab.items():
            if i not in added and all(c in table for c in token):
                self.token_bytes[i] = bytes(table[c] for c in token)
        self._ids = {content: i for i, content in added.items()}
        pattern = "|".join(re.escape(t) for t in sorted(self._ids, key=len, reverse=True))
        self._scan = re.compile(f"({pattern})" if pattern else "(?!)")
        empty = self._tokenizer.encode("", add_special_tokens=True).ids
        self._prefix = b"".join(escape(i) for i in empty)

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle) -> "PrefixKeys":
        return cls(bundle.tokenizer_json)

    @classmethod
    def from_tokenizer_json(cls, tokenizer_json: str) -> "PrefixKeys":
        return cls(tokenizer_json)

    def prompt_key(self, text: str, add_special_tokens: bool) -> bytes:
        head = self._prefix if add_special_tokens else b""
        parts = self._scan.split(text)
        return head + b"".join(escape(self._ids[p]) if n & 1 else p.encode() for n, p in enumerate(parts))

    def block_key(self, ids: Sequence[int]) -> bytes:
        table = self.token_bytes
        try:
            return b"".join([table[i] for i in ids])
        except IndexError:
            return b"".join([table[i] if i < len(table) else escape(i) for i in ids])

    def prompt_key_of(self, prompt: Prompt) -> bytes:
        if prompt.ids is not None:
            return self.block_key(prompt.ids)
        return self.prompt_key(prompt.text or "", prompt.add_special_tokens)

    def self_test(self) -> None:
        for text in ("Hello, world", "  a\n b", "é😀"):
            if self.block_key(self._tokenizer.encode(text).ids) != self.prompt_key(text, True):
                raise KeySelfTestError(f"block_key(encode(x)) != prompt_key(x) for {text!r}")
