"""A drafter without weights: what followed the last tokens in past answers of the same client and namespace.

Often right where a client asks the like again and again: agents, extraction, one form of answer to many prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from treeline_runtime.core import Req
from treeline_runtime.scheduler import ngrams
from treeline_runtime.scheduler.ngrams import Ngrams, Room
from treeline_runtime.turns import Turns

LENGTHS = (12, 6, 3)
"""Tokens that must be the same."""
PLACES = 8
"""The last places with the same tokens are looked at."""
LEAST_SHARE = 0.3
"""Guesses end where fewer of these places go on with all of them."""
MOST, LEAST = 131_072, 256
"""Tokens kept of all answers, and those that an owner's answers count for at least: the index takes 0.4 kB for each
token, and looks at all owners to choose whose to drop."""
MOST_COMING = 64
"""Answers that wait to be indexed, clients in turns; of more, the newest of the client with most are dropped."""
AT_ONCE, ANSWERS_AT_ONCE = 128, 4
"""Tokens that a step indexes, of so many answers at most: 0.2 ms, and as much to drop as many, or as many owners."""
CONTEXT, SHORTEST, LONGEST = LENGTHS[0], 8, 8_192
"""Tokens of a prompt that are kept before its answer, those of the shortest answer that is kept, and those that are
kept of a long one's end."""
END = -1
"""After each answer. No request has this token."""

Owner = tuple[str | None, str | None]
"""Client and namespace."""


class Texts:
    """The past answers of an owner, oldest first. All operations take constant time for each token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._first = 0  # the position of the first one
        self._last: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)
        """For each length, the hash of tokens → the position after them where they were last."""
        self._before: tuple[list[int], ...] = tuple([] for _ in LENGTHS)
        """For each length and position, where the tokens before it were the time before."""

    @property
    def size(self) -> int:
        return max(len(self.tokens), LEAST)

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            self.tokens.append(token)
            for length, last, before in zip(LENGTHS, self._last, self._before, strict=True):
                if length > end:
                    before.append(-1)
                    continue
                key = hash(tuple(self.tokens[end - length : end]))
                before.append(last.get(key, -1))
                last[key] = self._first + end

    def drop(self, count: int) -> None:
        """Drops the oldest tokens."""
        for length, last, before in zip(LENGTHS, self._last, self._before, strict=True):
            for start in range(min(count, len(self.tokens) - length)):
                key = hash(tuple(self.tokens[start : start + length]))
                if last[key] == self._first + start + length:
                    del last[key]
            del before[:count]
        del self.tokens[:count]
        self._first += count

    def after(self, tokens: Sequence[int], most: int, longer_than: int) -> list[int]:
        """What mostly followed the last tokens, at most so many; only if the same ones are longer than this."""
        for length, last, before in zip(LENGTHS, self._last, self._before, strict=True):
            if length <= longer_than:
                break
            place, ends = last.get(hash(tuple(tokens[-length:])), -1), list[int]()
            while place >= self._first + length and len(ends) < PLACES:
                ends.append(place - self._first)
                place = before[ends[-1]]
            if ends:
                return self._mostly(ends, most)
        return []

    def _mostly(self, ends: list[int], most: int) -> list[int]:
        """ends: the last one first."""
        enough, found = LEAST_SHARE * len(ends), list[int]()
        while ends and len(found) < most:
            following = [self.tokens[end] for end in ends]
            token = max(following, key=following.count)
            if token == END or following.count(token) < enough:
                break
            found.append(token)
            ends = [end + 1 for end in ends if self.tokens[end] == token and end + 1 < len(self.tokens)]
        return found


class Past:
    """Past answers of all owners, within a bound. The client with most loses its oldest: where it has most."""

    def __init__(self) -> None:
        self._room = Room()
        self._texts: dict[Owner, Texts] = {}
        self._coming = Turns[tuple[Owner, Iterator[int]]](MOST_COMING)

    def end(self, req: Req) -> None:
        """Takes the answer of a request, for the next steps."""
        if req.output_len >= SHORTEST:
            text = 0 if req.media is None else req.media.end
            tokens = req.tokens[max(req.prompt_len - CONTEXT, len(req.tokens) - LONGEST, text) :]
            self._coming.put(req.client, ((req.client, req.namespace), chain(tokens, (END,))))

    def forget(self) -> None:
        """No answer is known. No request may be running."""
        self._texts.clear()
        self._coming = Turns(MOST_COMING)

    def drafter(self, req: Req) -> Texted:
        return Texted(self._room, self, req)

    def step(self) -> None:
        """Indexes some of what it took, and drops as much if there is too much."""
        self._room.left, left = ngrams.AT_ONCE, AT_ONCE
        while left > 0 and (coming := self._coming.take(lambda _: True)) is not None:
            owner, tokens = coming
            part = list(islice(tokens, left))
            if len(part) == left:
                self._coming.put_back(owner[0], coming)
            left -= max(len(part), AT_ONCE // ANSWERS_AT_ONCE)
            self._texts.setdefault(owner, Texts()).add(part)
        if left < AT_ONCE:
            self._drop()

    def after(self, owner: Owner, tokens: Sequence[int], most: int, longer_than: int) -> list[int]:
        """See `Texts`."""
        texts = self._texts.get(owner)
        return [] if texts is None else texts.after(tokens, most, longer_than)

    def _drop(self) -> None:
        held: Counter[str | None] = Counter()
        for (client, _), texts in self._texts.items():
            held[client] += texts.size
        while held.total() > MOST:
            fullest = max(held, key=held.__getitem__)
            owner = max(
                (owner for owner in self._texts if owner[0] == fullest), key=lambda owner: self._texts[owner].size
            )
            texts = self._texts[owner]
            held[fullest] -= texts.size
            if len(texts.tokens) <= LEAST:  # less would count for as much
                del self._texts[owner]
            else:
                texts.drop(AT_ONCE)
                held[fullest] += texts.size


class Texted:
    """Implements `Drafter`: by a request's own text, or by past answers where more of their tokens are the same."""

    def __init__(self, room: Room, past: Past, req: Req) -> None:
        self._own = Ngrams(room)
        self._past = past
        self._owner = req.client, req.namespace

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        own = self._own.guess(tokens, most)
        return self._past.after(self._owner, tokens, most, self._own.same) or own
