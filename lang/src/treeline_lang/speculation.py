"""Fewer calls to paid APIs: text beyond a call's stop often contains the answer to the program's next call.

Two ways:

- *Completions.* A call ignores the stop and asks for `num_api_spec_tokens`. What comes after the stop is a Surplus: as
  long as the texts that the program appends are how it goes on, the next `gen` is cut from it.
- *Chats.* Texts and gens within one turn of the assistant are a pattern: one call makes the turn, and the pieces are
  read out of it, or the reply does not follow the pattern.

Limits count tokens, so a surplus knows its tokens; text that cannot be cut exactly is asked for again. A Surplus
belongs to one stream; branches do not share it, since each needs its own answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from treeline_lang.backends.base import Completion
from treeline_lang.errors import Refused, Unmatched
from treeline_lang.expressions import Role
from treeline_lang.sampling import Sampling
from treeline_lang.transcript import Prompt

if TYPE_CHECKING:
    from treeline_lang.executor import StreamExecutor

_OF_A_PART: Final = ("max_tokens", "stop")
"""Parameters in which the parts of one call may differ."""
_ALIKE: Final = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
"""Parameters with which parts can still be generated together."""
_UNBOUNDED: Final = 1 << 31
TRIES: Final = 3
"""The most tries of a turn whose text does not follow its pattern."""


def eligible(sampling: Sampling) -> bool:
    """Whether the text may be part of a longer one: it has only plain sampling parameters, a limit and stops. A penalty
    would count the other parts."""
    plain = Sampling(**{name: getattr(sampling, name) for name in (*_OF_A_PART, *_ALIKE)})
    one = replace(sampling, n=None) if sampling.n == 1 else sampling
    return one == plain and not sampling.frequency_penalty and not sampling.presence_penalty and sampling.limit > 0


def agree(one: Sampling, other: Sampling) -> bool:
    """Whether two parts are sampled alike."""
    return all(getattr(one, name) == getattr(other, name) for name in _ALIKE)


def as_asked(sampling: Sampling, tokens: int) -> Sampling:
    """A call that runs past its stop for at least so many tokens, and returns its tokens."""
    most = max(sampling.limit, tokens)
    return replace(sampling, stop=(), max_tokens=most, return_logprob=True, return_text_in_logprobs=True)


def pieces_of(completion: Completion) -> tuple[str, ...] | None:
    """The text's tokens; None if the backend does not report them, or they do not add up to the text (parts of a
    character)."""
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
    """One gen's share of a longer text."""

    text: str
    finish: dict[str, Any]
    rest: tuple[str, ...]
    """The tokens after it, its stop included."""


def part_of(pieces: Sequence[str], sampling: Sampling, ended: dict[str, Any] | None) -> Part | None:
    """Returns the result that a call with this sampling would have had, from another call's tokens; None if they are
    too few to know. `ended`: why the model stopped; None if it would have continued."""
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
    """The tokens after so many characters; a partly used token counts as one."""
    for number, piece in enumerate(pieces):
        if characters < len(piece):
            return (piece[characters:], *pieces[number + 1 :])
        characters -= len(piece)
    return ()


@dataclass(frozen=True, slots=True)
class Surplus:
    """Text that the model wrote beyond the used part."""

    before: str
    """The stream's text before it."""
    pieces: tuple[str, ...]
    sampling: Sampling
    """The sampling of its call."""
    ended: dict[str, Any] | None
    """The finish reason, if the model ended by itself."""

    def part(self, text: str, sampling: Sampling) -> tuple[Part, Surplus] | None:
        """Returns the result that a gen at the end of `text` would have had, and the remaining surplus; None if a call
        is needed."""
        if not text.startswith(self.before) or not agree(sampling, self.sampling):
            return None
        written = text[len(self.before) :]
        if not "".join(self.pieces).startswith(written):
            return None
        part = part_of(drop(self.pieces, len(written)), sampling, self.ended)
        return None if part is None else (part, replace(self, before=text + part.text, pieces=part.rest))


# ---- chats ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """A turn made of fixed texts and generated parts."""

    parts: tuple[str | Sampling, ...]

    @property
    def gens(self) -> list[Sampling]:
        return [part for part in self.parts if isinstance(part, Sampling)]

    def speculates(self, *, continues: bool) -> bool:
        """Whether one call for all is worthwhile and can be split: each gen but the last needs a stop."""
        gens = self.gens
        if not gens or not all(eligible(gen) and agree(gen, gens[0]) for gen in gens):
            return False
        return all(gen.stop for gen in gens[:-1]) and (len(gens) > 1 or (self.parts[0] != gens[0] and not continues))

    def asked(self, tokens: int, *, tells_tokens: bool) -> Sampling:
        """The one call, up to the last gen. A text has at most one token per byte."""
        needed = sum(part.limit if isinstance(part, Sampling) else len(part.encode()) for part in self._needed())
        asked = as_asked(replace(self.gens[0], max_tokens=needed), tokens)
        return asked if tells_tokens else replace(asked, return_logprob=None, return_text_in_logprobs=None)

    def _needed(self) -> tuple[str | Sampling, ...]:
        """Text after the last gen comes from the program alone."""
        last = max(number for number, part in enumerate(self.parts) if isinstance(part, Sampling))
        return self.parts[: last + 1]

    def read(self, reply: Completion) -> list[Completion] | None:
        """Each gen's completion; None if the reply does not follow the pattern. Without tokens, limits of single gens
        cannot be checked."""
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
    """Text and results that a stream has generated beyond its current position."""

    surplus: Surplus | None = None
    foreseen: deque[Completion] = field(default_factory=deque)
    """Results for the gens of the open turn."""
    blind: bool = False
    """The backend's tokens do not add up to its texts, so its surplus is unusable."""
    spent: int = 0
    """Failed calls that are not in a meta yet."""


# ---- which of a stream's gens ask the backend, and which need not ----------------------------------------------------

_NONE = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
"""The cost of a gen without a call. The metas of a run add up to all its calls."""


async def generate(stream: StreamExecutor, prompt: Prompt, sampling: Sampling) -> list[Completion]:
    """`backend.generate`, or a result that is already known. With speculation, metas have the number of `calls`."""
    ahead, run = stream.ahead, stream.run
    surplus, ahead.surplus = ahead.surplus, None
    tokens = run.call.num_api_spec_tokens
    if tokens is None or run.streaming:
        return await run.backend.generate(prompt, sampling, run.call)
    if ahead.foreseen:
        return [ahead.foreseen.popleft()]
    if not run.backend.chats and run.backend.tells_tokens and not ahead.blind and eligible(sampling):
        if surplus is not None and (taken := surplus.part(prompt.text, sampling)) is not None:
            part, ahead.surplus = taken
            return [Completion(part.text, {**_NONE, "finish_reason": part.finish})]
        if (made := await _beyond(stream, prompt, sampling, tokens)) is not None:
            return [made]
    completions = await run.backend.generate(prompt, sampling, run.call)
    first, *others = completions
    return [_counted(stream, first, 1), *others]


async def _beyond(stream: StreamExecutor, prompt: Prompt, sampling: Sampling, tokens: int) -> Completion | None:
    """Calls the model beyond the gen's stop and keeps the surplus in the stream. None if the gen's own result cannot be
    derived."""
    run, ahead = stream.run, stream.ahead
    asked = as_asked(sampling, tokens)
    try:
        [whole] = await run.backend.generate(prompt, asked, run.call)
    except Refused:  # perhaps for the number of tokens: then the call without speculation is not refused
        return None
    pieces = pieces_of(whole)
    finish = whole.meta.get("finish_reason") or {}
    ended = finish if finish.get("type") == "stop" else None
    part = None if pieces is None else part_of(pieces, sampling, ended)
    if part is None:
        ahead.blind = pieces is None
        ahead.spent += 1
        return None
    ahead.surplus = Surplus(prompt.text + part.text, part.rest, asked, ended)
    return _counted(stream, Completion(part.text, {**_without_tokens(whole), "finish_reason": part.finish}), 1)


def foresees(stream: StreamExecutor, role: Role) -> bool:
    """Whether one call may generate the turn that begins."""
    run = stream.run
    speculates = run.call.num_api_spec_tokens is not None and not run.streaming
    return speculates and run.backend.chats and role == "assistant"


async def foresee(stream: StreamExecutor, pattern: Pattern | None) -> None:
    """Generates the begun turn for its gens to use. If the replies do not match, the gens ask for themselves; raises
    Unmatched for a backend that cannot continue a begun turn."""
    run, tokens = stream.run, stream.run.call.num_api_spec_tokens
    continues = await run.backend.continues()
    if tokens is None or pattern is None or not pattern.speculates(continues=continues):
        return
    prompt = stream.transcript.prompt()
    asked = pattern.asked(tokens, tells_tokens=run.backend.tells_tokens)
    tries = TRIES if asked.temperature != 0 else 1  # it would say the same again
    for _ in range(tries):
        try:
            [reply] = await run.backend.generate(prompt, asked, run.call)
        except Refused:  # so many tokens, or to tell them: single gens ask for less
            if not continues:
                raise
            return
        found = pattern.read(reply)
        if found is not None:
            first = Completion(found[0].text, {**_without_tokens(reply), **found[0].meta})
            others = [Completion(one.text, {**_NONE, **one.meta}) for one in found[1:]]
            stream.ahead.foreseen = deque([_counted(stream, first, 1), *others])
            return
        stream.ahead.spent += 1
    if not continues:
        times = "once, at temperature 0" if tries == 1 else f"{tries} times"
        raise Unmatched(f"the model was asked {times} for the whole turn, and no reply matches the program")


def _without_tokens(whole: Completion) -> dict[str, Any]:
    """Its meta without tokens, which the program did not ask for."""
    return {name: value for name, value in whole.meta.items() if name not in ("output_token_logprobs", "output_ids")}


def _counted(stream: StreamExecutor, completion: Completion, calls: int) -> Completion:
    """The meta with its number of calls, failed ones included."""
    spent, stream.ahead.spent = stream.ahead.spent, 0
    return Completion(completion.text, {**completion.meta, "calls": calls + spent})
