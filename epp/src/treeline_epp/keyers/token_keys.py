"""Prefix keys for tokenizers that lose text: there prompts are tokenized, and a key is made of token ids.

Most tokenizers only cut the text that they are given, so that its bytes are its key (`treeline_wire.keys`). WordPiece,
or Unigram without byte fallback, drop and replace some of it; but engines announce token ids, and what they make of a
prompt can be made here too. Each id is written as its escape, so that index and picker see keys like any others.

Tokenizing takes about a millisecond for a thousand characters. So a text is cut into stretches at spaces between words,
and these are remembered: of a conversation that goes on, only what is new is tokenized. A request waits for `NEW_CHARS`
of that; what lies beyond it is done by a thread of our own, for those who ask next.
"""

from __future__ import annotations

import json
import logging
import re
import string
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import tokenizers
from treeline_wire import keys_selftest
from treeline_wire.keys import KeySelfTestError, PrefixKeys, escape
from treeline_wire.library_errors import LibraryError, library_errors
from treeline_wire.normalization import check_growth
from treeline_wire.prompt import Prompt
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_epp.keyers.shares import Owner, Turns

log = logging.getLogger(__name__)

STRETCH_CHARS: Final = 512
"""A stretch ends at the first space between words behind so many characters."""
LONGEST_CHARS: Final = 2048
"""Text without such a space for so long (some scripts have none) has no key from there on."""
NEW_CHARS: Final = 2048
"""What a request may wait for: two milliseconds or three."""
REMEMBERED: Final = 32_768
"""Stretches: at the usual 130 tokens each, some 50 MB."""
REMEMBERED_BYTES: Final = 64 << 20
"""Of stretches and their keys, which a client can make ten times longer than they are elsewhere."""
MOST_IDS: Final = 1 << 20
"""More than any known vocabulary has."""
WAITING: Final = 64
"""Texts that wait for the thread; more are not read on."""
_SHORT_WORDS: Final = " ".join([*string.ascii_letters, *string.digits, "é", "word", "工", "я"])
Stretch = tuple[str | None, str]
"""A namespace, and a text that it has sent."""
_BLANK: Final = re.compile(r"(?<=\w) (?=\w)")
"""A space between words. A stretch begins with it, so that tokenizers that put a space before a text put none there."""


class TokenKeys(PrefixKeys):
    """The keys of one tokenizer, as `PrefixKeys`; but `prompt_key` takes its time, unless the prompt is `affordable`.

    Shared between threads. `self_test` says whether the tokenizer can be used in stretches at all.
    """

    def __init__(self, tokenizer_json: str, stretch_chars: int = STRETCH_CHARS) -> None:
        """Raises `tokenizer.BundleError`."""
        try:
            with library_errors():
                tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
                tokenizer.no_truncation()
                tokenizer.no_padding()
                if tokenizer.normalizer is not None:
                    check_growth(json.loads(tokenizer.normalizer.__getstate__()))
                before, after = _template(tokenizer)
        except ValueError as error:
            raise BundleError(f"not a tokenizer: {str(error)[:200]}") from error
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        # Faster than making each; beyond it they are made, so an id that somebody made up costs nothing.
        self.token_bytes = [escape(i) for i in range(min(highest + 1, MOST_IDS))]
        self._tokenizer = tokenizer
        self._head, self._tail = self.block_key(before), self.block_key(after)
        self._stretches = Stretches(self, stretch_chars)

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle) -> TokenKeys:
        return cls(bundle.tokenizer_json)

    def prompt_key(self, text: str, add_special_tokens: bool, namespace: str | None = None) -> bytes:
        """The key of a text, of which every stretch is tokenized that is not remembered of the namespace."""
        key = b"".join(self._stretches.keys(text, namespace))
        return self._head + key + self._tail if add_special_tokens else key

    def affordable(self, prompt: Prompt, namespace: str | None = None, client: Owner = None) -> Prompt:
        """The prompt, or as much of its beginning as has a key in short time; the rest has one later."""
        if prompt.text is None:
            return prompt
        end = self._stretches.affordable(prompt.text, namespace, client)
        return prompt if end == len(prompt.text) else Prompt(prompt.text[:end], None, prompt.add_special_tokens)

    def self_test(self) -> None:
        """Tokenize texts in many scripts whole and cut at every such space. Raises `KeySelfTestError`."""
        cut = TokenKeys(self._tokenizer.to_str(), 1)
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.content]
        try:
            with library_errors():
                keys_selftest.run(cut, self._tokenizer, added)
                whole = self._tokenizer.encode(_SHORT_WORDS, add_special_tokens=False).ids
        except LibraryError as error:
            raise KeySelfTestError(str(error)) from None
        if cut.prompt_key(_SHORT_WORDS, False) != self.block_key(whole):
            raise KeySelfTestError("its tokens reach over spaces between words")

    def stretch_key(self, stretch: str) -> bytes:
        """The key of a stretch, tokenized now: as a batch, since for that the library lets other threads run. Raises
        `LibraryError`."""
        with library_errors():
            [encoding] = self._tokenizer.encode_batch([stretch], add_special_tokens=False)
        return self.block_key(encoding.ids)

    def join(self) -> None:
        """Wait until everything is read that was to be read on."""
        self._stretches.join()


class Stretches:
    """The keys of stretches of text: those remembered, and the thread that reads on, in which clients take turns. What
    one namespace has sent makes nothing faster for another."""

    def __init__(self, keys: TokenKeys, chars: int) -> None:
        self._keys = keys
        self._chars = chars
        self._known: OrderedDict[Stretch, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._waiting: Turns[Stretch] = Turns(WAITING)
        self._reader: threading.Thread | None = None

    def keys(self, text: str, namespace: str | None) -> Iterator[bytes]:
        """The keys of a text's stretches, in order, up to what the tokenizer fails at."""
        for stretch in self._cut(text):
            key = self._remembered((namespace, stretch))
            if key is None:
                try:
                    key = self._keys.stretch_key(stretch)
                except ValueError:
                    return
                self._remember((namespace, stretch), key)
            yield key

    def affordable(self, text: str, namespace: str | None, client: Owner) -> int:
        """How many characters have a key in short time: what is remembered, and `NEW_CHARS` that are tokenized now. The
        rest is left to the thread."""
        end, new = 0, 0
        for stretch in self._cut(text):
            if self._remembered((namespace, stretch)) is None:
                new += len(stretch)
                if new > NEW_CHARS and end:
                    self._read_on((namespace, text), client)
                    break
                try:
                    self._remember((namespace, stretch), self._keys.stretch_key(stretch))
                except ValueError:
                    break
            end += len(stretch)
        return end

    def join(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._reader is None)

    def _cut(self, text: str) -> Iterator[str]:
        """The stretches of a text; a longer text with the same beginning has the same ones, but for the last."""
        start, size = 0, len(text)
        while start < size:
            blank = _BLANK.search(text, start + self._chars, start + self._chars + LONGEST_CHARS)
            end = size if blank is None else blank.start()
            if end - start > self._chars + LONGEST_CHARS:
                return
            yield text[start:end]
            start = end

    def _remembered(self, stretch: Stretch) -> bytes | None:
        with self._lock:
            key = self._known.get(stretch)
            if key is not None:
                self._known.move_to_end(stretch)
            return key

    def _remember(self, stretch: Stretch, key: bytes) -> None:
        with self._lock:
            if stretch not in self._known:
                self._bytes += _size(stretch, key)
            self._known[stretch] = key
            while len(self._known) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
                self._bytes -= _size(*self._known.popitem(last=False))

    def _read_on(self, text: Stretch, client: Owner) -> None:
        with self._lock:
            self._waiting.put(client, text)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="token-keys", daemon=True)
                self._reader.start()

    def _read(self) -> None:
        """Until nothing waits: a thread that stayed would keep a tokenizer that is no longer used."""
        while True:
            with self._idle:
                if not len(self._waiting):
                    self._reader = None
                    self._idle.notify_all()
                    return
                namespace, text = self._waiting.take()
            try:
                for _ in self.keys(text, namespace):
                    pass
            except Exception:
                log.exception("a prompt could not be read on")


def _size(stretch: Stretch, key: bytes) -> int:
    return sys.getsizeof(stretch[1]) + sys.getsizeof(key)


def _template(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    raise ValueError("its post-processor changes the text's own tokens")
