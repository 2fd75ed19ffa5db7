"""A model's tokens as bytes, which grammars are matched against."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from treeline_wire.keys import PrefixKeys, escape
from treeline_wire.tokenizer import TokenizerBundle


class Vocabulary(msgspec.Struct, frozen=True):
    """`texts[i]` is the text of token i; b"": no text, so it can only be a stop token.

    Special tokens (`<|im_end|>`, `[TOOL_CALLS]`) are markup and not part of answers; their texts are in `marks`. Only a
    grammar for markup, a structural tag, may contain them.
    """

    texts: list[bytes]
    marks: dict[int, bytes]
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, bundle: TokenizerBundle, size: int, stop_ids: Sequence[int]) -> Vocabulary:
        """size: rows of the model's head, perhaps more than the tokenizer has ids. Raises BundleError."""
        texts = PrefixKeys.from_bundle(bundle).token_bytes[:size]
        texts = [b"" if text == escape(i) else text for i, text in enumerate(texts)]
        texts += [b""] * (size - len(texts))
        marks = dict[int, bytes]()
        for token in json.loads(bundle.tokenizer_json).get("added_tokens") or []:
            id, content = token["id"], token["content"].encode()
            if id >= size or id in stop_ids:
                continue
            if token.get("special"):
                marks[id] = content
                texts[id] = b""
            elif not texts[id]:
                texts[id] = content
        for id in stop_ids:
            if id < size:
                texts[id] = b""
        return cls(texts, marks, tuple(id for id in stop_ids if id < size))

    def with_marks(self) -> list[bytes]:
        """The texts including special tokens."""
        texts = list(self.texts)
        for id, text in self.marks.items():
            texts[id] = text
        return texts
