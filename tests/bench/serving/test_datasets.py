"""The datasets: lengths, sharing, order; the same for the same seed."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.datasets import DATASETS, DatasetError, Ids, Shape, Texts, Words
from treeline_bench.serving.messages import Conversation
from treeline_bench.serving.plan import arrivals

SMALL = {
    "random": Shape(num_prompts=20, input_len=30, output_len=9),
    "sharegpt": Shape(num_prompts=20),
    "generated-shared-prefix": Shape(groups=4, prompts_per_group=5, prefix_len=40, input_len=7, output_len=3),
    "multi-turn": Shape(num_prompts=5, turns=3, input_len=20, output_len=4),
}


@pytest.fixture(scope="module")
def words(maker: PromptMaker) -> Words:
    return Words(maker)


def made(name: str, shape: Shape, texts: Texts | None = None, seed: int = 1) -> list[Conversation]:
    DATASETS[name].check_only(shape)
    return DATASETS[name].make(shape, texts or Ids(), random.Random(seed))


@pytest.mark.parametrize("name", DATASETS)
def test_the_same_seed_gives_the_same_prompts_in_the_same_order(name: str, words: Words) -> None:
    for texts in (Ids(), words):
        assert made(name, SMALL[name], texts) == made(name, SMALL[name], texts)
        assert made(name, SMALL[name], texts) != made(name, SMALL[name], texts, seed=2)


@pytest.mark.parametrize("name", DATASETS)
def test_lengths_are_exact_in_the_models_own_tokens(name: str, maker: PromptMaker, words: Words) -> None:
    for conversation in made(name, SMALL[name], words):
        said = ""
        for turn in conversation.turns:
            assert isinstance(turn.piece, str)
            before = maker.count(said)
            said += turn.piece
            assert maker.count(said) - before == turn.piece_tokens
    for conversation in made(name, SMALL[name]):
        assert all(len(turn.piece) == turn.piece_tokens for turn in conversation.turns)


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 1), st.integers(0, 100))
def test_random_lengths_stay_within_the_ratio(most_in: int, most_out: int, ratio: float, seed: int) -> None:
    shape = Shape(num_prompts=5, input_len=most_in, output_len=most_out, range_ratio=ratio)
    for conversation in made("random", shape, seed=seed):
        [turn] = conversation.turns
        assert max(1, int(ratio * most_in)) <= turn.piece_tokens <= most_in
        assert max(1, int(ratio * most_out)) <= turn.output_tokens <= most_out


def test_the_defaults_are_those_of_the_field() -> None:
    lengths = [conversation.turns[0].piece_tokens for conversation in made("random", Shape())]
    assert len(lengths) == 1000
    assert 460 < statistics.mean(lengths) < 560  # uniform from 1 to 1,024
    shared = made("generated-shared-prefix", Shape())
    assert len(shared) == 64 * 16
    assert {(turn.piece_tokens, turn.output_tokens) for each in shared for turn in each.turns} == {(2048 + 128, 256)}


def test_groups_share_exactly_their_prefix_and_come_shuffled() -> None:
    shape = SMALL["generated-shared-prefix"]
    groups: dict[tuple[object, ...], int] = {}
    order = []
    for conversation in made("generated-shared-prefix", shape):
        prefix = tuple(conversation.turns[0].piece[:40])
        groups[prefix] = groups.get(prefix, 0) + 1
        order.append(prefix)
    assert sorted(groups.values()) == [5, 5, 5, 5]
    assert sum(one != other for one, other in itertools.pairwise(order)) > 3


def test_sharegpt_has_the_published_tails_within_the_limits_of_the_field() -> None:
    turns = [conversation.turns[0] for conversation in made("sharegpt", Shape())]
    assert all(4 <= turn.piece_tokens <= 1024 for turn in turns)
    assert all(4 <= turn.output_tokens <= 2048 - turn.piece_tokens for turn in turns)
    assert 110 < statistics.mean(turn.piece_tokens for turn in turns) < 180
    assert statistics.median(turn.piece_tokens for turn in turns) < statistics.mean(turn.piece_tokens for turn in turns)


def test_an_option_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(DatasetError, match="--turns means nothing to the dataset random"):
        made("random", Shape(turns=3))


@given(st.floats(0.1, 1000), st.integers(0, 1000))
def test_arrivals_are_in_order_from_zero_on_and_the_same_again(rate: float, seed: int) -> None:
    moments = arrivals(20, rate, random.Random(seed))
    assert moments[0] == 0
    assert moments == sorted(moments)
    assert moments == arrivals(20, rate, random.Random(seed))


def test_arrivals_keep_the_rate_and_vary_as_those_of_a_poisson_process() -> None:
    moments = arrivals(20_000, 50, random.Random(3))
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.variance(gaps) * 50**2 == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("rate", [0, -1])
def test_rates_have_to_be_above_zero(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        arrivals(1, rate, random.Random(0))
