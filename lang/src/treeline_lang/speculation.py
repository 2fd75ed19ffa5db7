"""Fewer calls to black-box APIs: what a program will ask next is often in what the model says beyond its stop.

Two ways, both pure here (`speculative` drives them):

- *Completions.* A call ignores the stop and asks for `num_api_spec_tokens`. What comes after the stop is a Surplus: as
  long as the texts that the program appends are how it goes on, the next `gen` is cut from it.
- *Chats.* Texts and gens within one turn of the assistant are a pattern: one call makes the turn, and the pieces are
  read out of it, or the reply does not follow the pattern.

A limit is one of tokens, so a surplus knows its tokens; what cannot be cut off exactly is asked for again. A Surplus
belongs to one stream: nothing of it is kept on a backend, and branches do not share it, as each is to have an answer of
its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from treeline_lang.backends.base import Completion
from treeline_lang.sampling import Sampling

_OF_A_PART: Final = ("max_tokens", "stop")
"""What parts of one call may differ in."""
_ALIKE: Final = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
"""What a part may ask for and still be made together with others."""
_UNBOUNDED: Final = 1 << 31
TRIES: Final = 3
"""How often a turn is asked for that does not follow its pattern."""


def eligible(sampling: Sampling) -> bool:
    """Whether such a text may be a part of a longer one: it asks for nothing but how tokens are sampled, how many there
    are and where it stops. A penalty would count what the other parts say."""
    plain = Sampling(**{name: getattr(sampling, name) for name in (*_OF_A_PART, *_ALIKE)})
    one = replace(sampling, n=None) if sampling.n == 1 else sampling
    return one == plain and not sampling.frequency_penalty and not sampling.presence_penalty and sampling.limit > 0


def agree(one: Sampling, other: Sampling) -> bool:
    """Whether two parts are sampled alike."""
    return all(getattr(one, name) == getattr(other, name) for name in _ALIKE)


def as_asked(sampling: Sampling, tokens: int) -> Sampling:
    """One that runs past its stop, for at least so many tokens, and tells them."""
    most = max(sampling.limit, tokens)
    return replace(sampling, stop=(), max_tokens=most, return_logprob=True, return_text_in_logprobs=True)


def pieces_of(completion: Completion) -> tuple[str, ...] | None:
    """The text's tokens. None where the backend does not tell, or its tokens do not make up the text: those that are a
    part of a character do not."""
    logprobs = completion.meta.get("output_token_logprobs")
    if logprobs is None:
        return None
    pieces: list[str] = []
    missing = completion.text
    for entry in logprobs if isinstance(logprobs, list) else (None,):
        if not missing:  # an end of text
            break
        piece = entry[2] if isinstance(entry, list | tuple) and len(entry) == 3 else None
        if not isinstance(piece, str) or not piece or not (missing.startswith(piece) or piece.startswith(missing)):
            return None
        pieces.append(piece[: len(missing)])
        missing = missing[len(piece) :]
    return None if missing else tuple(pieces)


@dataclass(frozen=True, slots=True)
class Part:
    """What one gen has of a longer text."""

    text: str
    finish: dict[str, Any]
    rest: tuple[str, ...]
    """The tokens behind it, its stop among them."""


def part_of(pieces: Sequence[str], sampling: Sampling, ended: dict[str, Any] | None) -> Part | None:
    """What a call with this sampling would have made, of the tokens that another one made. `ended`: why the model made
    no more, None where it would have. None: so few tokens do not say."""
    text = "".join(pieces[: sampling.limit])
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in sampling.stop if stop in text]
    if found:
        end, _, stop = min(found)  # the one that is complete first
        start = end - len(stop)
        return Part(text[:start], {"type": "stop", "matched": stop}, drop(pieces, start))
    if len(pieces) >= sampling.limit:
        return Part(text, {"type": "length", "length": sampling.limit}, tuple(pieces[sampling.limit :]))
    return None if ended is None else Part(text, ended, ())


def drop(pieces: Sequence[str], characters: int) -> tuple[str, ...]:
    """What comes after so many characters; a token of which some are left counts as one."""
    for number, piece in enumerate(pieces):
        if characters < len(piece):
            return (piece[characters:], *pieces[number + 1 :])
        characters -= len(piece)
    return ()


@dataclass(frozen=True, slots=True)
class Surplus:
    """What a model has said beyond what was used of it."""

    before: str
    """The text of the stream that it goes on from."""
    images: int
    """In that text."""
    pieces: tuple[str, ...]
    sampling: Sampling
    """How the call was sampled."""
    ended: dict[str, Any] | None
    """Why there is no more of it, if the model has ended it by itself."""

    def part(self, text: str, images: int, sampling: Sampling) -> tuple[Part, Surplus] | None:
        """What a gen at the end of `text` would have made, and what is left; None: it must be asked for."""
        if images != self.images or not text.startswith(self.before) or not agree(sampling, self.sampling):
            return None
        written = text[len(self.before) :]
        if not "".join(self.pieces).startswith(written):
            return None
        part = part_of(drop(self.pieces, len(written)), sampling, self.ended)
        return None if part is None else (part, replace(self, before=text + part.text, pieces=part.rest))


# ---- chats ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """A turn: texts, and what is to be generated between them."""

    parts: tuple[str | Sampling, ...]

    @property
    def gens(self) -> list[Sampling]:
        return [part for part in self.parts if isinstance(part, Sampling)]

    def speculates(self, *, continues: bool) -> bool:
        """Whether one call for all is worth it, and can be read: each gen but the last needs a stop."""
        gens = self.gens
        if not gens or not all(eligible(gen) and agree(gen, gens[0]) for gen in gens):
            return False
        return all(gen.stop for gen in gens[:-1]) and (len(gens) > 1 or (self.parts[0] != gens[0] and not continues))

    def asked(self, tokens: int, *, tells_tokens: bool) -> Sampling:
        """One call for all, up to the last gen. A text has no more tokens than bytes."""
        needed = sum(part.limit if isinstance(part, Sampling) else len(part.encode()) for part in self._needed())
        asked = as_asked(replace(self.gens[0], max_tokens=needed), tokens)
        return asked if tells_tokens else replace(asked, return_logprob=None, return_text_in_logprobs=None)

    def _needed(self) -> tuple[str | Sampling, ...]:
        """What comes behind the last gen is written by the program alone."""
        last = max(number for number, part in enumerate(self.parts) if isinstance(part, Sampling))
        return self.parts[: last + 1]

    def read(self, reply: Completion) -> list[Completion] | None:
        """The completion of each gen; None where the reply does not follow the pattern. Where a reply has no tokens,
        the limits of single gens are not known to be kept."""
        tokens = pieces_of(reply)
        pieces = (reply.text,) if tokens is None else tokens
        finish = reply.meta.get("finish_reason") or {"type": "stop", "matched": None}
        found: list[Completion] = []
        for part in self._needed():
            if isinstance(part, str):
                if not "".join(pieces).startswith(part):
                    return None
                pieces = drop(pieces, len(part))
                continue
            last = len(found) == len(self.gens) - 1
            cut_off = tokens is not None and finish["type"] == "length"
            sampling = replace(part, max_tokens=_UNBOUNDED) if tokens is None else part
            made = part_of(pieces, sampling, finish if last and not cut_off else None)
            if made is None or (not last and made.finish["type"] != "stop"):
                return None
            found.append(Completion(made.text, {"finish_reason": made.finish}))
            pieces = made.rest
        return found


# ---- a stream's -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ahead:
    """What a stream knows beyond where it is."""

    surplus: Surplus | None = None
    foreseen: deque[Completion] = field(default_factory=deque)
    """What the gens of the open turn have made."""
    blind: bool = False
    """The backend's tokens do not make up its texts: its surplus cannot be used."""
    spent: int = 0
    """Calls that came to nothing, not counted in a meta yet."""
