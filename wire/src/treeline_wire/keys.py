"""Prefix keys: bytes that identify a prompt's prefix, tokenized or not.

Theory of operation. Engines announce cached blocks as token ids; requests arrive as text. Tokenizing a request takes
milliseconds, but most tokenizers only *cut* text: the pieces' bytes, joined, are the normalized text. Both sides use
those bytes, so

    block_key(encode(text)) == prompt_key(text)

holds although only the left side tokenizes. Three things need care. The normalizer (Unicode forms, a leading space)
applies to each stretch between added tokens, as in the library. Special and added tokens are escapes: 0xFF, which UTF-8
never contains, and their id; one scan finds them in text. The ids of an image are escapes, too, in the place of its
placeholder's (`split_at`, `item_key`). Tokens that the post-processor adds (BOS) are a constant.
Tokenizers that lose text (unknown tokens, dropped white space) cannot keep the property, and fail `self_test`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers
from msgspec import Struct

from . import keys_selftest
from .added_tokens import AddedToken, AddedTokens, PlainScan, TextSegment, any_of
from .keys_selftest import KeySelfTestError
from .library_errors import LibraryError, library_errors
from .media import item_cycle
from .normalization import check_growth, compile_normalizer, flatten, space_mark
from .prompt import Prompt
from .tokenizer import BundleError, TokenizerBundle

__all__ = ["KeySelfTestError", "PrefixKeys", "escape", "item_key", "split_at"]

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_ESCAPE: Final = struct.Struct(">BI")
_ESCAPED: Final = re.compile(rb"\xff.{4}", re.DOTALL)
ESCAPE_BYTES: Final = _ESCAPE.size


def escape(token_id: int) -> bytes:
    """Returns the 5 bytes of a special or added token (or an id without text): 0xFF and the id."""
    return _ESCAPE.pack(0xFF, token_id)


def item_key(digest: bytes, count: int) -> bytes:
    """Returns the key of an item's ids, as `block_key(item_ids(...))` would be. O(count) at memory speed.

    If its count is unknown (0): a key of its digest that is the beginning of no key of ids.
    """
    *words, number = item_cycle(digest, count)
    # ids begin with the words
    cycle = b"".join(map(escape, (*words, number) if count else (number, *words)))
    size = count * ESCAPE_BYTES
    return (cycle * (size // len(cycle) + 1))[: size or len(cycle)]


def split_at(key: bytes, placeholders: Mapping[bytes, str]) -> tuple[list[bytes], list[str]]:
    """Returns the keys of the texts between a text's placeholders, one more than there are of these, and the kinds of
    those. `placeholders`: kinds by escape. O(bytes)."""
    texts: list[bytes] = []
    kinds: list[str] = []
    at = 0
    for found in _ESCAPED.finditer(key):
        kind = placeholders.get(found.group())
        if kind is not None:
            texts.append(key[at : found.start()])
            kinds.append(kind)
            at = found.end()
    return [*texts, key[at:]], kinds


class KeyTable(Struct, frozen=True):
    """Data to rebuild keys in another process in a fraction of the seconds that a large tokenizer takes to load.

    `skeleton` is the tokenizer's document without its vocabulary, `token_bytes` as in `PrefixKeys`, `literal_bytes` the
    pieces that texts may spell out.
    """

    skeleton: str
    token_bytes: list[bytes]
    literal_bytes: dict[str, bytes]


class PrefixKeys:
    """The keys of one tokenizer. Immutable and thread-safe.

    - Keys: `prompt_key`, `prompt_key_of` (from requests), `block_key` (from token ids).
    - `token_bytes`: id → bytes, for callers that build keys of blocks themselves.
    - `self_test`: whether the tokenizer holds the property at all. Run it once after construction.
    - `table`, `from_table`: copy tested keys to another process.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Builds the keys of a tokenizer.json. Raises `tokenizer.BundleError`."""
        try:
            with library_errors():
                tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
                spec: dict[str, Any] = json.loads(tokenizer_json)
                check_growth(spec.get("normalizer"))
                # Older files (RoBERTa's) do not name the model's type.
                spec["model"].setdefault("type", type(tokenizer.model).__name__)
                tokenizer.no_truncation()
                tokenizer.no_padding()
                self._tokenizer = tokenizer
                self._build(spec, tokenizer, None)
        except Exception as error:  # the library raises bare ones for a document that it does not understand
            raise BundleError(f"not a tokenizer: {str(error)[:200]}") from error

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle) -> PrefixKeys:
        """Builds the keys of a bundle's tokenizer. Raises `tokenizer.BundleError`."""
        return cls(bundle.tokenizer_json)

    @classmethod
    def from_table(cls, table: KeyTable) -> PrefixKeys:
        """Rebuilds the keys that made the table; run `self_test` in the process that made it. O(vocabulary), without
        long library calls.
        """
        keys = cls.__new__(cls)
        spec = json.loads(table.skeleton)
        with library_errors():
            bare = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**bare, "normalizer": spec.get("normalizer")}))
        keys._build(spec, tokenizer, table)
        return keys

    def table(self) -> KeyTable:
        """Returns the input of `from_table`."""
        return KeyTable(self._skeleton, self.token_bytes, self._literal_bytes)

    def prompt_key(self, text: str, add_special_tokens: bool) -> bytes:
        """Returns the key of a text. O(len(text)); about a millisecond for 500 KB.

        `add_special_tokens`: as in tokenizing the request. Raises UnicodeEncodeError for lone surrogates, which
        `prompt` refuses before.
        """
        key = self._plain_key(text)
        if key is None:
            key = b"".join([self._segment_key(segment) for segment in self._added.split(text)])
        return self._head + key + self._tail if add_special_tokens else key

    def prompt_key_of(self, prompt: Prompt) -> bytes:
        """Returns the key of a request's prompt, given as text or ids."""
        if prompt.ids is not None:
            return self.block_key(prompt.ids)
        return self.prompt_key(prompt.text or "", prompt.add_special_tokens)

    def block_key(self, ids: Sequence[int]) -> bytes:
        """Returns the key of non-negative token ids; keys of consecutive blocks concatenate. O(len(ids))."""
        table = self.token_bytes
        try:
            return b"".join([table[i] for i in ids])
        except IndexError:  # models pad their vocabulary beyond the tokenizer's
            return b"".join([table[i] if i < len(table) else escape(i) for i in ids])

    def self_test(self) -> None:
        """Checks the property on texts in many scripts. Raises `KeySelfTestError`; takes about 10 ms."""
        if self._refusal is not None:
            raise KeySelfTestError(self._refusal)
        assert hasattr(self, "_tokenizer"), "keys from a table were tested before"
        try:
            with library_errors():
                keys_selftest.run(self, self._tokenizer, self._added_contents, every_category=self._keeps_matches)
        except LibraryError as error:
            raise KeySelfTestError(str(error)) from error

    def _build(self, spec: dict[str, Any], tokenizer: tokenizers.Tokenizer, made: KeyTable | None) -> None:
        """Builds the keys. `made`: the vocabulary of an earlier run; None: read from `spec` and `tokenizer`."""
        model = spec["model"]
        self._skeleton = json.dumps({**spec, "model": {k: v for k, v in model.items() if k not in ("vocab", "merges")}})
        pre = flatten(spec.get("pre_tokenizer"), "pretokenizers")
        norm = spec.get("normalizer")
        byte_levels = [p for p in pre if p["type"] == "ByteLevel"]
        metaspaces = [p for p in pre if p["type"] == "Metaspace"]
        self._byte_level = bool(byte_levels) or any(n["type"] == "ByteLevel" for n in flatten(norm, "normalizers"))
        self._mark = metaspaces[0]["replacement"] if metaspaces else space_mark(norm)
        self._prefix_always, self._prefix_first = _prefix_rule(byte_levels, metaspaces)
        self._byte_fallback = bool(model.get("byte_fallback"))
        added = [AddedToken.from_spec(t) for t in spec.get("added_tokens") or []]
        self._normalizer = compile_normalizer(norm, tokenizer.normalizer, self._mark)
        self._added = AddedTokens(added, self._normalizer.normalize)
        self._added_contents = [t.content for t in added if t.content]
        self._refusal = _refusal(model, pre, self._byte_level, self._byte_fallback)
        self._keeps_matches = any(map(_keeps_matches, pre))
        known = {t.id: t for t in added}
        self.token_bytes = made.token_bytes if made is not None else self._token_table(tokenizer, known)
        self._head, self._tail = map(self.block_key, _template(spec.get("post_processor")))
        self._literal_bytes = made.literal_bytes if made is not None else self._literal_pieces(model, tokenizer, added)
        self._literal = re.compile(any_of(list(self._literal_bytes))) if self._literal_bytes else None
        self._plain = self._plain_scan(added)

    def _token_table(self, tokenizer: tokenizers.Tokenizer, added: dict[int, AddedToken]) -> list[bytes]:
        own = tokenizer.get_vocab(with_added_tokens=False)
        size = max((*own.values(), *added), default=-1) + 1
        table = [escape(i) for i in range(size)]
        chars = _byte_chars()
        for token, i in own.items():
            known = added.get(i)
            if known is not None and known.special and not known.single_word:
                continue
            # An added token that the model has, too, may come from either, so it is text.
            if not self._byte_level:
                table[i] = self._text_bytes(token)
                continue
            values = [chars.get(char, -1) for char in token]
            if -1 not in values:
                table[i] = bytes(values)
        return table

    def _text_bytes(self, token: str) -> bytes:
        found = _BYTE_PIECE.fullmatch(token) if self._byte_fallback else None
        if found is not None:
            return bytes([int(found[1], 16)])
        return (token if self._mark is None else token.replace(self._mark, " ")).encode()

    def _plain_scan(self, added: list[AddedToken]) -> PlainScan | None:
        flagged = any(t.normalized or t.lstrip or t.rstrip or t.single_word for t in added)
        if flagged or self._prefix_always or self._literal is not None or not self._normalizer.local:
            return None
        keys = {t.content.encode(): self.token_bytes[t.id] for t in added if t.content}
        if self._prefix_first and any(key[0] != 0xFF for key in keys.values()):
            return None
        return PlainScan(keys)

    def _plain_key(self, text: str) -> bytes | None:
        """Returns the key of an already normal text, without token flags: one scan. None: use the general way."""
        if self._plain is None or self._normalizer.normalize(text) != text:
            return None
        key = self._plain.replace(text.encode())
        if self._prefix_first and key and key[0] != 0x20 and key[0] != 0xFF:
            return b" " + key
        return key

    def _segment_key(self, segment: TextSegment) -> bytes:
        if segment.token is not None:
            return self.token_bytes[segment.token.id]
        text = segment.text
        if (self._prefix_always or (self._prefix_first and segment.first)) and text and text[0] != " ":
            text = " " + text
        if self._literal is None or self._literal.search(text) is None:
            return text.encode()
        return self._with_literals(text, self._literal)

    def _with_literals(self, text: str, literal: re.Pattern[str]) -> bytes:
        """Returns the key of a text with pieces of a Unigram model, which also matches byte and special pieces that a
        text spells out.
        """
        parts: list[bytes] = []
        done = 0
        for match in literal.finditer(text):
            parts.append(text[done : match.start()].encode())
            parts.append(self._literal_bytes[match.group()])
            done = match.end()
        parts.append(text[done:].encode())
        return b"".join(parts)

    def _literal_pieces(
        self, model: dict[str, Any], tokenizer: tokenizers.Tokenizer, added: list[AddedToken]
    ) -> dict[str, bytes]:
        if model["type"] != "Unigram":
            return {}
        ids = {piece: i for i, (piece, _) in enumerate(model["vocab"])}
        literals = {p for p in ids if self._byte_fallback and _BYTE_PIECE.fullmatch(p)}
        literals |= {t.content for t in added if t.content in ids}
        chosen = {p for p in literals if ids[p] in [token.id for token in tokenizer.model.tokenize(p)]}
        return {p: self.token_bytes[ids[p]] for p in chosen}


def _prefix_rule(byte_levels: list[dict[str, Any]], metaspaces: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Returns whether a space is put before every stretch of text, and before the first."""
    if metaspaces:
        scheme = metaspaces[0].get("prepend_scheme")
        if scheme is None:  # written by older versions of the library
            scheme = "always" if metaspaces[0].get("add_prefix_space", True) else "never"
        return scheme == "always", scheme == "first"
    return any(p.get("add_prefix_space", True) for p in byte_levels), False


def _refusal(model: dict[str, Any], pre: list[dict[str, Any]], byte_level: bool, byte_fallback: bool) -> str | None:
    """Returns why this kind of tokenizer cannot keep the property; None if it may."""
    if model["type"] not in ("BPE", "Unigram"):
        return f"a {model['type']} model replaces unknown text"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "the model marks word boundaries in its tokens"
    for step in pre:
        if step["type"] in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"):
            return f"the pre-tokenizer {step['type']} drops text"
        if step.get("behavior") == "Removed" and not _keeps_matches(step):
            return f"the pre-tokenizer {step['type']} drops what it splits at"
    if not byte_level and not byte_fallback:
        return "the model has no byte fallback: unknown characters become one unknown token"
    return None


def _keeps_matches(step: dict[str, Any]) -> bool:
    """Returns whether a split drops the text that does *not* match, as in the files of GPT-3.5 and GPT-4o. It loses
    nothing if the pattern matches every text; the self-test checks that.
    """
    return step.get("behavior") == "Removed" and bool(step.get("invert"))


def _template(spec: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Returns the ids that the post-processor adds before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in flatten(spec, "processors"):
        if step["type"] == "TemplateProcessing":
            ids: list[int] = []
            for item in step["single"]:
                if "Sequence" in item:
                    before, ids = [*ids, *before], after
                else:
                    ids.extend(step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
            after = ids
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            before, after = [step["cls"][1], *before], [*after, step["sep"][1]]
    return before, after


def _byte_chars() -> dict[str, int]:
    """Returns GPT-2's alphabet: a printable character for each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in sorted(plain)}
    table.update((chr(256 + i), byte) for i, byte in enumerate(b for b in range(256) if b not in plain))
    return table
