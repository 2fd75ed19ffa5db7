"""Speculative decoding: whose next tokens are guessed, and how many.

A `Drafter` guesses tokens of one request. A step computes them together with the last known token, and samples a token
before and after each guess, with the parameters, random numbers, masks and penalties that decoding one by one would
use there. Sampled tokens count up to the first that is not the guess after it (`Launched`), so the output is the same
as without guesses. Rejected ones leave keys and values that the next step overwrites.

Guesses can only follow known tokens: before a step with guesses, all results are waited for (`waits`), if the guesses
are worth it. Without, launches overlap as always.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from treeline_wire.media import FIRST_ID

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.messages import Speculated
from treeline_runtime.scheduler.grammars import Jumps
from treeline_runtime.scheduler.past import Past
from treeline_runtime.scheduler.reports import SchedulerStats

logger = logging.getLogger(__name__)

DEPTHS: tuple[tuple[int, tuple[tuple[float, int], ...]], ...] = (
    (1, ((0.2, 1), (0.4, 3), (0.6, 5), (0.75, 7))),
    (8, ((0.4, 1), (0.6, 3), (0.8, 5))),
    (32, ((0.6, 1), (0.75, 3))),
    (96, ()),
)
"""From a number of decoding requests on: from a share of right guesses on, the number of guesses. Where many decode, a
token more takes time, which only good guesses are worth."""
WAIT = 0.3
"""Right guesses to expect for each request, on average, before a step waits for results: the device then computes
nothing while it is planned, for about so much of a step's time (measured on an H200: 0.25 to 0.4, for 1 to 32
requests)."""
SLACK = 0.1
"""A depth is kept until the share is so much lower than what it needs."""
FIRST_SHARE = 0.5
"""The share of right guesses that a request begins with."""
FORGET = 0.9
"""Weight of the past in that share, for each guess."""
MOST_SAMPLED = 256
"""Sequences and guesses of a step with guesses, at most: its logits need memory, and a graph this size."""


class Drafter(Protocol):
    """Guesses the tokens of one request. Knows nothing else."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """The next tokens, at most so many. tokens: all known ones; rarely, the last have changed since the last call,
        else they have only become more."""


@dataclass(slots=True)
class Drafting:
    """A request's drafter, and how it has done."""

    drafter: Drafter
    share: float = FIRST_SHARE
    """Of its guesses that were right, lately; also of those that were not verified."""
    depth: int = 0
    most: int = 0
    """Guesses that pay in the next step."""
    expected: int | None = None
    """Its guess of the next token; None: it has none."""
    right: int = 0
    """Of the draft, as many are taken for right whatever is sampled. Only where acceptance is simulated."""
    counts: Speculated | None = None


def depth_for(batch: int, share: float, before: int) -> int:
    """The number of guesses for a request of which this share was right, where `before` was the last number."""
    deepest = kept = 0
    for needs, depth in next(steps for least, steps in reversed(DEPTHS) if batch >= least):
        if share >= needs:
            deepest = depth
        if share >= needs - SLACK:
            kept = depth
    return max(deepest, min(before, kept))


def paying(depth: int, share: float, cost: float) -> int:
    """The number of guesses, at most `depth`, with which tokens come fastest, where each is right with this share, and
    one more for each request takes this part of a step more."""
    given, right = 1.0, share
    for place in range(depth):
        if right * (1 + cost * place) <= cost * given:
            return place
        given += right
        right *= share
    return depth


class Speculation:
    """Gives requests their drafts, and learns what became of them."""

    def __init__(
        self,
        new_drafter: Callable[[Req], Drafter],
        most: int,
        stats: SchedulerStats,
        jumps: Jumps,
        *,
        overlaps: bool,
        past: Past | None = None,
    ) -> None:
        """most: guesses for a request in a step. overlaps: whether launches do, unless results are waited for. past:
        what its drafters share."""
        self._new_drafter = new_drafter
        self._most = most
        self._stats = stats
        self._jumps = jumps
        self._overlaps = overlaps
        self._past = past
        self._can_pay = True
        """Whether guesses might, however good they are, where as many requests decode as last."""

    def waits(self, reqs: Sequence[Req]) -> bool:
        """Whether the next step of these requests is planned only when all results are known. Asked once a step."""
        if self._past is not None:
            self._past.step()
        flying = [req for req in reqs if req.in_flight]
        return any(req.draft for req in flying) or (bool(flying) and self.pays(reqs))

    def pays(self, reqs: Sequence[Req]) -> bool:
        """Whether a step of these requests should have guesses: more right ones for each, on average, than the device
        could compute of steps without while it waits."""
        batch, right = len(reqs), 0.0
        self._can_pay = batch > 0 and depth_for(batch, 1.0, 0) > 0
        cost = self._stats.step_times.cost(batch)
        for req in reqs if self._can_pay else ():
            if (state := req.drafting) is not None:
                state.most, chance = self._most_of(req, state, batch, cost), 1.0
                for _ in range(state.most):
                    chance *= state.share
                    right += chance - cost
        return right > (WAIT * batch if self._overlaps else 0)

    def draft(self, req: Req, room: int) -> list[int]:
        """The guesses for a request whose tokens are all known, after `pays`; at most `room`. None of them ends the
        output, or is an item's."""
        if (state := req.drafting) is None:
            return []
        most = min(state.most, room, req.max_new_tokens - req.output_len - 1)
        if most <= 0:
            return []
        found: list[int] = []
        for token in self._guess(req, state, most):
            if token in req.stop_ids or token >= FIRST_ID:
                break
            found.append(token)
        return found if req.constraint is None else found[: self._allowed(req, found)]

    def wanted(self, reqs: Sequence[Req]) -> int:
        """Guesses that the device should make after a step of these requests."""
        return 0

    def learn(self, req: Req, taken: Sequence[int], arrived: Sequence[int] = ()) -> None:
        """taken: new tokens that a step gave it. arrived: guesses of the device for what follows."""
        if req.processor is not None:
            return  # it is called once per token, with state: nothing to guess
        state = req.drafting
        if state is None:
            state = req.drafting = Drafting(self._new_drafter(req))
        elif req.draft:
            right, wrong = max(len(taken) - 1, 0), len(taken) <= len(req.draft)
            self._stats.on_draft(len(req.draft), right)
            before = state.counts or Speculated()
            state.counts = Speculated(before.steps + 1, before.guesses + len(req.draft), before.right + right)
            for was_right in [True] * right + [False] * wrong:
                _count(state, was_right)
        elif state.expected is not None and taken:
            _count(state, self._is_right(state.expected, taken[0]))
        req.draft = []
        state.expected = next(iter(self._guess(req, state, 1)), None) if self._can_pay else None

    def end(self, req: Req) -> None:
        """Its output is complete, or as much as there will be."""
        if self._past is not None:
            self._past.end(req)

    def forget(self) -> None:
        """What was said is not known any more. No request may be running."""
        if self._past is not None:
            self._past.forget()

    def _guess(self, req: Req, state: Drafting, most: int) -> list[int]:
        """The tokens of text that its grammar forces, if it does not jump there anyway; else what its drafter says."""
        if not self._jumps.allowed(req) and (forced := self._jumps.forced(req, len(req.tokens))) is not None:
            return forced.append[:most]
        return state.drafter.guess(req.tokens, most)

    def _allowed(self, req: Req, draft: Sequence[int]) -> int:
        """The number of first tokens that its constraint allows, up to one that ends the output or lets it jump, as it
        would without guesses."""
        constraint, jumps = req.constraint, self._jumps.allowed(req)
        assert constraint is not None
        taken = count = 0
        for token in draft:
            try:
                constraint.accept(token)
                taken += 1
                if constraint.finished or (jumps and req.output_len + taken >= req.jumps_from and constraint.forced()):
                    break
            except Exception:
                break
            count += 1
        constraint.rollback(taken)
        return count

    def _most_of(self, req: Req, state: Drafting, batch: int, cost: float) -> int:
        if state.expected is None or (req.constraint is not None and not req.constraint.allows_guesses):
            return 0
        state.depth = depth_for(batch, state.share, state.depth)
        return paying(min(state.depth, self._most), state.share, cost)

    def _is_right(self, guess: int, token: int) -> bool:
        return guess == token


PROBE = 8
"""Where no guess pays, one of so many steps makes one, to learn whether it would have been right."""


class Chained(Speculation):
    """Takes its guesses from the device, where a step makes those for the next one (`Chains`)."""

    def __init__(self, most: int, stats: SchedulerStats, jumps: Jumps, *, overlaps: bool) -> None:
        super().__init__(lambda _: self._arrived, most, stats, jumps, overlaps=overlaps)
        self._arrived = _Arrived(0, [])
        """Of the result that is being learnt."""
        self._steps = 0

    def wanted(self, reqs: Sequence[Req]) -> int:
        known = ((FIRST_SHARE, 0) if req.drafting is None else (req.drafting.share, req.drafting.depth) for req in reqs)
        batch, cost = len(reqs), self._stats.step_times.cost(len(reqs))
        most = max(paying(min(depth_for(batch, share, depth), self._most), share, cost) for share, depth in known)
        self._steps += 1
        return most or int(depth_for(batch, 1.0, 0) > 0 and self._steps % PROBE == 0)

    def learn(self, req: Req, taken: Sequence[int], arrived: Sequence[int] = ()) -> None:
        jumped = len(req.tokens) != req.kv_len + 1
        self._arrived = _Arrived(len(req.tokens), [] if jumped else list(arrived))
        if req.drafting is not None:
            req.drafting.drafter = self._arrived
        super().learn(req, taken)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Guesses that came with a result. Implements `Drafter`."""

    at: int
    """They follow so many tokens."""
    guesses: list[int]

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        return self.guesses[:most] if len(tokens) == self.at else []


class Simulated(Speculation):
    """Takes guesses for right at a fixed rate, whatever they are: the speed of a drafter that is not there. The
    outputs are nonsense."""

    def __init__(self, rate: float, most: int, stats: SchedulerStats, jumps: Jumps, *, overlaps: bool) -> None:
        super().__init__(lambda _: _Repeated(), most, stats, jumps, overlaps=overlaps)
        logger.warning("--speculative-simulate-acceptance: outputs are nonsense; for measurements of speed only")
        self._rate = rate
        self._chance = random.Random(0)

    def draft(self, req: Req, room: int) -> list[int]:
        if req.constraint is not None:
            return []
        found = super().draft(req, room)
        if req.drafting is not None:
            right = 0
            while right < len(found) and self._is_right(0, 0):
                right += 1
            req.drafting.right = right
        return found

    def _is_right(self, guess: int, token: int) -> bool:
        return self._chance.random() < self._rate


class _Repeated:
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        return [tokens[-1]] * most


def _count(state: Drafting, was_right: bool) -> None:
    state.share = FORGET * state.share + (1 - FORGET) * was_right


def speculation(config: SchedulerConfig, stats: SchedulerStats, jumps: Jumps, *, overlaps: bool) -> Speculation | None:
    """None: each step samples one token."""
    most = config.most_guesses
    if config.speculative_simulate_acceptance is not None:
        return Simulated(config.speculative_simulate_acceptance, most, stats, jumps, overlaps=overlaps)
    if config.speculative_draft_model_path is not None:
        return Chained(most, stats, jumps, overlaps=overlaps)
    past = Past()
    return Speculation(past.drafter, most, stats, jumps, overlaps=overlaps, past=past) if most else None
