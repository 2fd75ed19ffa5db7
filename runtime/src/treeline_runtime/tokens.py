"""Token ids to text, piece by piece: no socket, no torch.

More than decode() for three reasons: a character may span tokens (text that ends in U+FFFD is not final), tokenizers
may join or strip at the start (so new tokens are decoded with earlier ones), and a possible beginning of a stop string
must be held back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treeline_runtime.messages import DetokenizeInit, FinishReason, SamplingParams
from treeline_runtime.stop_regex import RegexFinder

REPLACEMENT = "�"

UNDECIDED_PUSHES = 32
"""After so many pushes, text that ends in U+FFFD, or an empty addition, is no longer held back: a character has at
most four bytes, a token at least one. So a longer run is no unfinished one, nor decoded again for each token."""
SETTLED_TOKENS = 4
"""In such a run, the text before this many last tokens is final."""

Decode = Callable[[list[int]], str]
"""Token ids → text, with special tokens kept or skipped."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The text that a push released."""

    text: str
    matched: str | None = None
    """The stop string or pattern that ended the text."""
    unused: int = 0
    """Number of pushed ids after the one that completed the match."""


class StopFinder:
    """Finds stop strings in text that comes in pieces (Knuth, Morris and Pratt): O(characters x stop strings)."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._failures = [_failures(s) for s in self._stop]
        self._states = [0] * len(self._stop)
        """For each stop string, the length of its longest beginning that ends the text so far."""

    @property
    def begun(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str, *, ignore: bool = False) -> tuple[int, str] | None:
        """Returns the first completed match: the number of characters of `text` up to its end, and the stop string. Of
        several that end at the same character the longest counts. Nothing may be fed after a match.

        `ignore`: a match completed within `text` does not count.
        """
        best: tuple[int, str] | None = None
        for index, stop in enumerate(self._stop):
            end = self._feed_one(index, stop, text, ignore)
            if end is not None and (best is None or (end, -len(stop)) < (best[0], -len(best[1]))):
                best = end, stop
        return best

    def _feed_one(self, index: int, stop: str, text: str, ignore: bool) -> int | None:
        failures, state, at = self._failures[index], self._states[index], 0
        while at < len(text):
            if not state:  # the usual case: look for a beginning
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            at += 1
            while state and stop[state] != char:
                state = failures[state - 1]
            state += stop[state] == char
            if state == len(stop):
                if not ignore:
                    return at
                state = failures[state - 1]
        self._states[index] = state
        return None


@functools.lru_cache(256)
def _failures(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of its longest proper end that is also a beginning."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        length += stop[at] == stop[length]
        table[at] = length
    return tuple(table)


class IncrementalDetokenizer:
    """A request's ids in, text out.

    However the ids are split, the joined deltas are `decode(all ids)` up to the end or the first completed stop string
    (the longest of those at the same character). Stop strings completed within the first `min_tokens` tokens do not
    count. The stop string is cut off unless `no_stop_trim`. A `stop_regex` ends the text after the token that completes
    a match, and nothing is cut.

    Exception: byte fallback decodes a run of byte tokens at once. If the run is not UTF-8, it becomes U+FFFD; parts
    released before stay as they were, and what follows after `UNDECIDED_PUSHES` is decoded separately.

    `ids[surr:read]` is text already released, kept as context.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
        min_tokens: int = 0,
        stop_regex: tuple[str, ...] = (),
    ) -> None:
        self._decode = decode
        self._stop = StopFinder(stop)
        self._patterns = RegexFinder(stop_regex) if stop_regex else None
        self._finds_stops = any(stop) or bool(stop_regex)
        self._no_stop_trim = no_stop_trim
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._count = 0
        self._undecided = 0
        """Pushes since text was handed on."""
        self._surr = 0
        self._read = 0
        self._said: str | None = None
        """The text from `surr` on that was handed on, where it is more than that of the ids up to `read`."""
        self._held = ""
        self._ended = False

    @classmethod
    def of(
        cls, asked: DetokenizeInit | SamplingParams, decode: Callable[[list[int], bool], str]
    ) -> IncrementalDetokenizer:
        """`decode`: (token ids, skip special tokens) → text."""
        return cls(
            lambda ids: decode(ids, asked.skip_special_tokens),
            stop=asked.stop,
            no_stop_trim=asked.no_stop_trim,
            min_tokens=asked.min_new_tokens,
            stop_regex=asked.stop_regex,
        )

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None, *, withdrawn: int = 0) -> Delta:
        """Takes new ids; with `finish` set, also releases everything held back.

        A stop token that ended generation is cut off unless `no_stop_trim`. `withdrawn`: how many earlier ids are
        replaced; the new ones begin with their text. Both sides of that cut are whole characters.
        """
        if self._ended:
            return Delta("")
        if withdrawn:
            self._withdraw(withdrawn)
        ids = list(token_ids)
        trimmed = (
            finish is not None
            and finish.type == "stop"
            and isinstance(finish.matched, int)
            and ids[-1:] == [finish.matched]
            and not self._no_stop_trim
        )
        if trimmed:
            ids.pop()
        if not self._finds_stops or not ids:
            return self._take(ids, finish)
        released = ""
        for unused, id in zip(range(len(ids) - 1, -1, -1), ids, strict=True):
            delta = self._take([id], None if unused else finish)
            released += delta.text
            if delta.matched is not None:
                return Delta(released, delta.matched, unused + trimmed)
        return Delta(released)

    def _withdraw(self, count: int) -> None:
        kept = len(self._ids) - count
        if kept < self._read:
            said = self._text_said()
            if self._surr > kept:  # look for a context before
                behind = said[len(self._decode(self._ids[self._surr : self._read])) :]
                context = max(kept - SETTLED_TOKENS, 0)
                said = self._decode(self._ids[context : self._read]) + behind
                while said.startswith(REPLACEMENT) and kept - context < 3 * SETTLED_TOKENS and context:
                    context -= 1  # it begins within a character
                    said = self._decode(self._ids[context : self._read]) + behind
                self._surr = context
            self._read, self._said = kept, said
        del self._ids[kept:]
        self._count -= count
        self._undecided = 0

    def _text_said(self) -> str:
        return self._decode(self._ids[self._surr : self._read]) if self._said is None else self._said

    def _take(self, ids: list[int], finish: FinishReason | None) -> Delta:
        self._ids += ids
        self._count += len(ids)
        self._ended = finish is not None
        text = self._new_text(final=self._ended)
        before = len(self._held)
        self._held += text
        early = self._count <= self._min_tokens
        found = self._stop.feed(text, ignore=early)
        if found is not None:
            end, stop = before + found[0], found[1]
            self._ended = True
            return Delta(self._held[: end if self._no_stop_trim else end - len(stop)], stop)
        if self._patterns is not None and (pattern := self._patterns.feed(text, ignore=early)) is not None:
            self._ended = True
            return Delta(self._held, pattern)
        cut = len(self._held) - (0 if self._ended else self._stop.begun)
        released, self._held = self._held[:cut], self._held[cut:]
        return Delta(released)

    def _new_text(self, *, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._text_said()
        text = self._decode(self._ids[self._surr :])
        self._undecided += 1
        if not final and self._undecided > UNDECIDED_PUSHES:
            if text == before:  # special tokens that are left out: they say nothing later either
                del self._ids[self._read :]
                self._undecided = 0
                return ""
            if text.endswith(REPLACEMENT):
                return self._settled_text(before, text)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._hand_on(len(self._ids))
        return text[len(before) :]

    def _hand_on(self, end: int) -> None:
        """The text of the ids up to `end`."""
        if self._said is None:  # else `read` may be within a character
            self._surr = self._read
        self._read, self._undecided, self._said = end, 0, None

    def _settled_text(self, before: str, text: str) -> str:
        """The final part of a long run that is not UTF-8."""
        end = len(self._ids) - SETTLED_TOKENS
        settled = self._decode(self._ids[self._surr : end])
        if len(settled) <= len(before) or not text.startswith(settled):
            return ""  # it ends within a character: with one of the next tokens it will not
        self._hand_on(end)
        return settled[len(before) :]
