"""How many tokens are guessed, which, and what is never guessed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_constraints import Toy, alternating, only
from treeline_runtime.core import Req
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.scheduler import ngrams
from treeline_runtime.scheduler.drafting import DEPTHS, SLACK, Drafting, Simulated, Speculation, depth_for
from treeline_runtime.scheduler.grammars import Jumps
from treeline_runtime.scheduler.launched import Launched, Sampled
from treeline_runtime.scheduler.ngrams import LENGTHS, Ngrams, Room
from treeline_runtime.scheduler.past import Past
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.reports import SchedulerStats
from treeline_runtime.scheduler.table import TableManager

# ---- n-grams ----------------------------------------------------------------------------------------------


def followed(tokens: list[int], most: int) -> list[int]:
    """Return what followed the last place with the same tokens, as a slow search finds it."""
    for length in LENGTHS:
        for at in range(len(tokens) - 1, length - 1, -1):
            if tokens[at - length : at] == tokens[-length:]:
                text = list(tokens)
                for i in range(most):
                    text.append(text[at + i])
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 9),
    st.integers(1, 7),
)
def test_what_followed_the_longest_same_tokens_is_guessed(
    prompt: list[int], output: list[int], most: int, at_once: int
) -> None:
    drafter, tokens = Ngrams(Room()), list(prompt)
    for i in range(0, len(output) + 1, at_once):
        assert drafter.guess(tokens, most) == followed(tokens, most)
        tokens += output[i : i + at_once]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=9), st.integers(0, 20))
def test_replaced_tokens_make_no_trouble(parts: list[list[int]], back: int) -> None:
    drafter, tokens = Ngrams(Room()), [0, 1, 0, 1, 0, 1, 0]
    for part in parts:
        tokens = tokens[: max(len(tokens) - back, 7)] + part
        assert len(drafter.guess(tokens, 4)) in (0, 4)


def test_a_long_prompt_is_indexed_in_parts_and_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "WINDOW", 40)
    monkeypatch.setattr(ngrams, "AT_ONCE", 0)
    monkeypatch.setattr(ngrams, "LEAST", 15)
    drafter, tokens = Ngrams(Room()), [*range(100), *range(60, 70)]
    assert [drafter.guess(tokens, 2) for _ in range(3)] == [[], [], [70, 71]]
    assert drafter.guess([*tokens, 50, 51, 52, 53], 2) == [], "the beginning is not there"


# ---- depths -----------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 7))
def test_a_deeper_draft_needs_a_larger_share_and_fewer_requests(batch: int, share: float, before: int) -> None:
    depth = depth_for(batch, share, before)
    assert depth_for(batch, min(share + 0.2, 1.0), before) >= depth
    assert depth_for(batch, share, 0) <= depth <= max(before, depth_for(batch, share, 0))
    assert depth_for(batch, share, depth) == depth, "it stays while the share does"
    assert depth == depth_for(batch, share, 0) or share >= SLACK
    assert depth_for(batch + 300, share, before) == 0


def test_a_depth_changes_down_only_beyond_the_slack() -> None:
    for least, steps in DEPTHS:
        for needs, depth in steps:
            assert depth_for(least, needs, 0) == depth
            assert depth_for(least, needs - SLACK / 2, depth) == depth
            assert depth_for(least, needs - 1.5 * SLACK, depth) < depth


# ---- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "finite", "taken", "failed"),
    [
        ([1, 2, 3], [True, True, True], [1, 2, 3], False),
        ([1, 9, 3], [True, True, True], [1, 9], False),
        ([9, 2, 3], [True, True, True], [9], False),
        ([1, 9, 3], [True, True, False], [1, 9], False),
        ([1, 2, 3], [True, False, True], [1], False),
        ([1, 2, 3], [True, True, False], [1, 2], False),
        ([1, 2, 3], [False, True, True], [1], True),
    ],
)
def test_a_result_counts_up_to_the_first_wrong_guess_or_fault(
    sampled: list[int], finite: list[bool], taken: list[int], failed: bool
) -> None:
    launched, results = Launched(StepPlan([0], [5], [8], sampling=[0, 0, 0], drafts={0: [1, 2]})), [Sampled()]
    launched._take_tokens(results, sampled, finite)
    assert (results[0].tokens, results[0].wrong) == (taken, 3 - len(taken))
    assert (results[0].failed is not None) is failed, "a fault after right guesses comes with the next step"


# ---- drafts -----------------------------------------------------------------------------------------------


class Always:
    """Guesses these tokens."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        return self._tokens[:most]


def begun(output: Sequence[int] = (4,), **sampling: int | tuple[int, ...]) -> Req:
    """Return a request with some output."""
    params = SamplingParams(**({"max_new_tokens": 50} | sampling))  # type: ignore[arg-type]
    req = Req.of(
        GenerateReq("a", [1, 2, 3], params), seed=0, eos_ids=(9,), max_new_tokens=params.max_new_tokens, arrival=0
    )
    req.tokens += output
    return req


def guessing(*guesses: int, overlaps: bool = True) -> Speculation:
    stats = SchedulerStats()
    return Speculation(lambda _: Always(*guesses), 6, stats, no_jumps(stats), overlaps=overlaps)


def no_jumps(stats: SchedulerStats) -> Jumps:
    return Jumps(lambda: None, TableManager(1, 16, 4), stats, None)


def draft_of(req: Req, *guesses: int, room: int = 50) -> list[int]:
    speculation = guessing(*guesses)
    speculation.learn(req, req.tokens[-1:])
    assert req.drafting is not None
    req.drafting.share = 1.0
    assert speculation.pays([req])
    return speculation.draft(req, room)


def test_drafts_are_bounded() -> None:
    assert draft_of(begun(), *range(20, 40)) == list(range(20, 26)), "by the setting"
    assert draft_of(begun(), *range(20, 40), room=2) == [20, 21], "by the step"
    assert draft_of(begun(max_new_tokens=5), *range(20, 40)) == [20, 21, 22], "one is sampled after them"
    assert draft_of(begun(max_new_tokens=2), *range(20, 40)) == []


def test_no_guess_ends_the_output() -> None:
    assert draft_of(begun(), 20, 9, 21) == [20], "the model's end"
    assert draft_of(begun(stop_token_ids=(30,)), 20, 30, 21) == [20]
    req = begun()
    req.constraint = Toy(only(5, 6, 7))
    assert draft_of(req, 5, 6, 7) == [5, 6], "the constraint ends with the third"


def test_a_constraint_cuts_a_draft_and_stays_where_it_was() -> None:
    req = begun(output=())
    toy = req.constraint = Toy(alternating)
    req.take_tokens([4])
    assert draft_of(req, 21, 40, 42, 43) == [21, 40]
    assert toy.output == [4]


def test_nothing_is_guessed_for_a_constraint_that_took_too_much_work() -> None:
    req, speculation = begun(output=()), guessing(21)
    toy = req.constraint = Toy(alternating)
    req.take_tokens([4])
    speculation.learn(req, [4])
    assert speculation.pays([req])
    toy.allows_guesses = False
    assert not speculation.pays([req])
    assert speculation.draft(req, 50) == []


def test_guesses_that_are_not_verified_count_too() -> None:
    speculation = guessing(7)
    req = begun()
    speculation.learn(req, [4])
    assert req.drafting is not None
    shares = [req.drafting.share]
    for token in (7, 7, 8):
        req.tokens.append(token)
        speculation.learn(req, [token])
        shares.append(req.drafting.share)
    assert shares[0] < shares[1] < shares[2] > shares[3]
    assert req.drafting.counts is None, "no step has verified any"


def test_results_are_waited_for_where_a_guess_is_likely() -> None:
    speculation = guessing(7)
    req, other = begun(), begun()
    req.in_flight = other.in_flight = 1
    assert not speculation.waits([req, other]), "nothing is known of their first token"
    speculation.learn(req, [4])
    assert speculation.waits([req, other])
    assert req.drafting is not None
    req.drafting.share, req.drafting.depth = 0.0, 0
    assert not speculation.waits([req, other]), "it is never right"
    req.draft = [7]
    assert speculation.waits([req, other]), "its guesses are being verified"
    req.in_flight = 0
    assert not speculation.waits([req, other])


def test_few_guesses_among_many_requests_are_not_waited_for() -> None:
    for overlaps in (False, True):
        speculation = guessing(7, overlaps=overlaps)
        reqs = [begun() for _ in range(40)]
        for i, req in enumerate(reqs):
            speculation.learn(req, [4])
            assert req.drafting is not None
            req.drafting.share = 0.9 if i < 2 else 0.0
        assert speculation.pays(reqs) is not overlaps, "two of forty have three guesses"
        assert speculation.pays(reqs[:16])
        reqs[5].in_flight = 1
        assert speculation.waits(reqs) is not overlaps
        reqs[0].drafting.share = reqs[1].drafting.share = 0.6  # type: ignore[union-attr]
        assert speculation.pays(reqs[:10]) is not overlaps, "a guess counts only after right ones"
    for req in reqs:
        assert req.drafting is not None
        req.drafting.share = 0.0
    assert not guessing(7, overlaps=False).pays(reqs)


def test_prompts_that_come_together_are_indexed_over_many_steps() -> None:
    """So that no step of others takes long."""
    reqs = [begun() for _ in range(40)]
    stats, past = SchedulerStats(), Past()
    speculation = Speculation(past.drafter, 7, stats, no_jumps(stats), overlaps=True, past=past)
    for req in reqs:
        req.tokens[:0] = range(2000)
    indexed, steps = 0, 0
    while indexed < 40 * len(reqs[0].tokens):
        speculation.waits(reqs)
        for req in reqs:
            req.tokens.append(7)
            speculation.learn(req, [7])
        before, indexed = indexed, sum(req.drafting.drafter._own._indexed for req in reqs)  # type: ignore[union-attr]
        assert 0 < indexed - before <= ngrams.AT_ONCE + 40 * ngrams.LEAST
        steps += 1
    assert steps < 200


def test_simulated_guesses_are_right_at_the_given_rate(caplog: pytest.LogCaptureFixture) -> None:
    stats = SchedulerStats()
    speculation, req = Simulated(0.7, 3, stats, no_jumps(stats), overlaps=False), begun()
    assert "outputs are nonsense" in caplog.text
    speculation.learn(req, [4])
    for _ in range(2000):
        assert speculation.pays([req])
        req.draft = speculation.draft(req, 50)
        assert isinstance(req.drafting, Drafting)
        speculation.learn(req, [4] * (req.drafting.right + 1))
    tried, (first, second, third) = stats.total_drafts, stats.accepted_per_position
    assert first / tried == pytest.approx(0.7, abs=0.04)
    assert second / first == pytest.approx(0.7, abs=0.04)
    assert third / second == pytest.approx(0.7, abs=0.04)
    req.constraint = Toy(alternating)
    assert speculation.draft(req, 50) == [], "a grammar's output stays one"
