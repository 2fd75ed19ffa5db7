"""From token ids to text, a piece at a time: no socket, no torch.

Three things make it more than decode(): a character may span tokens (a text that ends in U+FFFD is not final), a
tokenizer may join or strip at the start of what it decodes (so new tokens are decoded together with those before them),
and text that could be the beginning of a stop string must not leave before it is known not to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treeline_runtime.messages import FinishReason

REPLACEMENT = "�"

Decode = Callable[[list[int]], str]
"""Token ids → text, special tokens kept or skipped as the request wishes."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one push released."""

    text: str
    matched: str | None = None
    """The stop string that ended the text; nothing is released after it."""


class IncrementalDetokenizer:
    """One request's ids in, text out.

    Whatever the ids are split into, the deltas joined are `decode(all ids)` up to the end of generation or, if a stop
    string occurs in it, up to that: the one that is complete first, and of several complete at the same character the
    longest. The stop string itself is left out unless `no_stop_trim`.

    One exception: byte fallback decodes a whole run of byte tokens at once, and where such a run turns out not to be
    UTF-8, all of it becomes U+FFFD; what was handed on of that run before stays as it was.

    `ids[surr:read]` is text already handed on, kept as context for decoding what follows.
    """

    def __init__(self, decode: Decode, *, stop: Sequence[str] = (), no_stop_trim: bool = False) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._no_stop_trim = no_stop_trim
        self._ids: list[int] = []
        self._surr = 0
        self._read = 0
        self._held = ""
        self._ended = False

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> Delta:
        """Take new ids; with `finish` set, also release everything that was held back.

        A stop token that ended generation is not part of the text unless `no_stop_trim`.
        """
        if self._ended:
            return Delta("")
        ids = list(token_ids)
        if (
            finish is not None
            and finish.type == "stop"
            and isinstance(finish.matched, int)
            and ids
            and ids[-1] == finish.matched
            and not self._no_stop_trim
        ):
            ids.pop()
        self._ids += ids
        self._ended = finish is not None
        self._held += self._new_text(final=finish is not None)
        matched = self._first_stop()
        if matched is not None:
            start, stop = matched
            self._ended = True
            return Delta(self._held[: start + len(stop) if self._no_stop_trim else start], stop)
        keep = 0 if finish is not None else self._possible_start()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return Delta(text)

    def _new_text(self, *, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._decode(self._ids[self._surr : self._read])
        text = self._decode(self._ids[self._surr :])
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._surr, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _first_stop(self) -> tuple[int, str] | None:
        """(index in the held text, stop string) of the match that ends first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            index = self._held.find(stop)
            if index >= 0:
                candidate = (index + len(stop), index, stop)
                best = candidate if best is None else min(best, candidate)
        return best and best[1:]

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
