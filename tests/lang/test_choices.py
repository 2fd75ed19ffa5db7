"""Deciding between texts by the logprobs of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_lang import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from treeline_lang.choices import CHOICES_METHODS, ChoicesMethod, Decision, TokenLogprob, tokens_of_choice


def decided(method: ChoicesMethod, given: Sequence[Sequence[float]], alone: Sequence[Sequence[float]] = ()) -> Decision:
    """Decide by these logprobs of each choice's tokens."""
    one, other = ([[TokenLogprob(value, None, None) for value in each] for each in all_] for all_ in (given, alone))
    return method.decide(["x"] * len(one), one, other)


LOGPROBS = st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=6), min_size=1, max_size=6)


def test_the_mean_does_not_favour_short_texts_and_the_first_of_equals_wins() -> None:
    decision = decided(token_length_normalized, [[-3.0], [-1.0, -2.0, -1.0], [-2.0, -2.0]])
    assert (decision.index, decision.scores) == (1, [-3.0, pytest.approx(-4 / 3), -2.0])
    assert decided(token_length_normalized, [[-1.0], [-1.0, -1.0]]).index == 0
    assert decided(token_length_normalized, [[-1.0, 0.0], [-0.6]]).index == 0, "a logprob of 0 counts"


def test_greedy_selection_compares_token_by_token_as_decoding_does() -> None:
    better_mean = [[-1.0, -9.0, -9.0], [-2.0, 0.0, 0.0]]
    assert decided(greedy_token_selection, better_mean).index == 0
    assert decided(token_length_normalized, better_mean).index == 1
    shared = [[-1.0, -3.0], [-1.0, -2.0], [-5.0, 0.0]]
    assert decided(greedy_token_selection, shared).index == 1
    assert decided(greedy_token_selection, [[-1.0], [-1.0, -0.5]]).index == 1, "the short one goes on with its mean"


def test_unconditional_likelihood_measures_how_much_the_prompt_helps() -> None:
    given_prompt, alone = [[-1.0, -1.0], [-2.0, -2.0]], [[0.0, -1.0], [0.0, -9.0]]
    decision = decided(unconditional_likelihood_normalized, given_prompt, alone)
    assert (decision.index, decision.scores) == (1, [-0.5, 2.5])
    healed = decided(unconditional_likelihood_normalized, [[-1.0, -1.0]], [[-4.0]])
    assert healed.scores == [1.0], "aligned at the end"


@given(LOGPROBS, st.sampled_from(sorted(CHOICES_METHODS)))
def test_the_chosen_one_has_the_best_score(logprobs: list[list[float]], method: str) -> None:
    decision = decided(CHOICES_METHODS[method], logprobs, logprobs)
    assert decision.scores[decision.index] == max(decision.scores)
    assert len(decision.scores) == len(logprobs)


@given(LOGPROBS)
def test_greedys_choice_has_the_best_first_token(logprobs: list[list[float]]) -> None:
    chosen = decided(greedy_token_selection, logprobs).index
    assert logprobs[chosen][0] == max(one[0] for one in logprobs)


def tokens(*texts: str | None) -> list[TokenLogprob]:
    return [TokenLogprob(-1.0, number, text) for number, text in enumerate(texts)]


def test_a_choices_tokens_are_the_last_that_hold_its_characters() -> None:
    read = tokens("of ", "is", " Par", "is")
    assert [token.id for token in tokens_of_choice(read, " Paris", 2)] == [2, 3]
    assert [token.id for token in tokens_of_choice(read, "aris", 2)] == [2, 3], "healed: the token is the choice's"
    assert [token.id for token in tokens_of_choice(read, "s is Paris and more than there is", 2)] == [0, 1, 2, 3]


@pytest.mark.parametrize("odd", [None, "\ufffd"])
def test_prompt_tokens_are_left_out_if_tokens_have_no_text(odd: str | None) -> None:
    read = tokens("of ", "is", odd, odd)
    assert [token.id for token in tokens_of_choice(read, "é", 2)] == [2, 3]
    assert [token.id for token in tokens_of_choice(tokens(odd), "é", 2)] == [0], "never none"
