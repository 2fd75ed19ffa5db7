"""Guesses from past answers: only what was said in the same namespace, mostly, and within bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_engine import Harness, prompt
from treeline_runtime.core import Req
from treeline_runtime.messages import FlushReq, GenerateReq, SamplingParams, SleepReq, UpdateWeightsReq, WakeReq
from treeline_runtime.scheduler import past
from treeline_runtime.scheduler.past import END, Owner, Past, Texts


def answered(owner: Owner, ids: list[int], output: list[int]) -> Req:
    client, namespace = owner
    message = GenerateReq("a", ids, SamplingParams(max_new_tokens=9999), namespace, client)
    req = Req.of(message, seed=0, eos_ids=(), max_new_tokens=9999, arrival=0)
    req.tokens += output
    return req


def learnt(*texts: tuple[Owner, list[int]]) -> Past:
    known = Past()
    for owner, output in texts:
        known.end(answered(owner, [], output))
        while known._coming:
            known.step()
    return known


def occurs(part: list[int], text: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "MOST": 300,
            "LEAST": 20,
            "AT_ONCE": 16,
            "MOST_COMING": 5,
            "SHORTEST": 2,
            "LONGEST": 45,
        }.items():
            patch.setattr(past, name, value)
        yield


OWNERS: list[Owner] = [(None, None), (None, "salt"), ("ada", "x"), ("ada", "y"), ("bob", "x")]
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(st.lists(st.tuples(st.sampled_from(OWNERS), TOKENS, TOKENS, st.integers(0, 4)), max_size=40), st.integers(1, 8))
def test_guesses_were_said_in_the_same_namespace_and_memory_is_bounded(
    answers: list[tuple[Owner, list[int], list[int], int]], most: int
) -> None:
    known, said = Past(), {owner: [END] for owner in OWNERS}
    for owner, ids, output, steps in answers:
        req = answered(owner, ids, output)
        guesses = known.drafter(req)._past.after(owner, req.tokens, most, 0)
        assert len(guesses) <= most
        assert not guesses or occurs(req.tokens[-3:] + guesses, said[owner])
        assert not guesses or occurs(req.tokens[-3:] + guesses, known._texts[owner].tokens), "dropped text is gone"
        known.end(req)
        if len(output) >= 2:
            said[owner] += [*req.tokens[max(len(ids) - past.CONTEXT, 0) :][-past.LONGEST :], END]
        for _ in range(steps):
            known.step()
        held = known._texts.values()
        assert sum(texts.size for texts in held) <= past.MOST
        assert len(known._coming) <= past.MOST_COMING
        for texts in held:
            assert all(len(last) <= len(texts.tokens) == len(before) for last, before in texts_index(texts))


def texts_index(texts: Texts) -> Iterator[tuple[dict[int, int], list[int]]]:
    return zip(texts._last, texts._before, strict=True)


@given(TOKENS, TOKENS, st.integers(0, 30))
def test_an_index_that_lost_its_oldest_is_one_of_the_rest(first: list[int], then: list[int], count: int) -> None:
    texts, fresh = Texts(), Texts()
    texts.add(first)
    texts.drop(count)
    texts.add(then)
    fresh.add([*first[count:], *then])
    assert texts.tokens == fresh.tokens
    assert [set(last) for last in texts._last] == [set(last) for last in fresh._last]
    assert texts.after(then, 5, 0) == fresh.after(then, 5, 0)


def test_what_followed_most_often_is_guessed_while_it_is_likely() -> None:
    texts = Texts()
    texts.add([1, 2, 3, 4, 5, END, 1, 2, 3, 4, 6, END, 1, 2, 3, 7, 8, END])
    assert texts.after([1, 2, 3], 9, 0) == [4, 6], "then the answer ended"
    texts.add([1, 2, 3, 4, 5, 8, END])
    assert texts.after([1, 2, 3], 9, 0) == [4, 5], "one of four went on with 8"
    texts.add([1, 2, 3, 4, 5, 8, END])
    assert texts.after([1, 2, 3], 9, 0) == [4, 5, 8]
    assert texts.after([1, 2, 3], 1, 0) == [4]


def test_the_longer_match_wins_and_the_requests_own_one_if_both_are_long() -> None:
    owner, told = OWNERS[2], [*range(20, 34), 5, 6, 7, 8]
    known = learnt((owner, told))
    other = [1, 2, 3, 31, 32, 33, 50, 51]
    assert known.drafter(answered(owner, [], told)).guess([*other, *told[:14]], 2) == [5, 6], "12 against 3"
    assert known.drafter(answered(owner, [], told)).guess([*other, 31, 32, 33], 2) == [50, 51], "3 against 3"
    assert known.drafter(answered(OWNERS[3], [], told)).guess([40, *told[:14]], 2) == [], "not in this namespace"


def test_one_client_or_namespace_with_much_traffic_leaves_the_others_their_share() -> None:
    mine, rng = list(range(100)), random.Random(1)
    known = learnt((OWNERS[4], mine))
    for i in range(60):
        owner = ("eve", f"salt {rng.randint(0, 99)}") if i % 2 else OWNERS[2]
        known.end(answered(owner, [], rng.choices(range(1000), k=50)))
        while known._coming:
            known.step()
    assert known.after(OWNERS[4], mine[:60], 3, 0) == [60, 61, 62]
    assert len(known._texts) <= past.MOST / past.LEAST
    held = {owner[0]: sum(texts.size for at, texts in known._texts.items() if at[0] == owner[0]) for owner in OWNERS}
    assert held["ada"] > past.MOST / 3 - 2 * past.AT_ONCE


def test_one_clients_many_long_answers_delay_and_displace_none_of_others() -> None:
    known, mine = Past(), list(range(past.AT_ONCE - 2))
    for _ in range(20):
        known.end(answered(("eve", None), [], [7] * past.LONGEST))
    known.end(answered(("ada", "x"), [], mine))
    for _ in range(20):
        known.end(answered(("eve", "y"), [], [7] * past.LONGEST))
        assert len(known._coming) == past.MOST_COMING
    known.step()
    known.step()
    assert known.after(("ada", "x"), mine[:5], 3, 0) == [5, 6, 7]


def test_a_step_indexes_a_bounded_part() -> None:
    known = Past()
    for owner in OWNERS[:3]:
        known.end(answered(owner, [], list(range(past.AT_ONCE // 2))))
    for _ in range(4):
        before = sum(len(texts.tokens) for texts in known._texts.values())
        known.step()
        assert sum(len(texts.tokens) for texts in known._texts.values()) - before <= past.AT_ONCE
    assert not known._coming
    assert [texts.tokens[-1] for texts in known._texts.values()] == [END] * 3


def test_a_step_pays_for_few_answers_however_short() -> None:
    """Each may be of an owner who is new, and for whom another is looked for and dropped."""
    known = Past()
    for i in range(past.MOST_COMING):
        known.end(answered(("eve", f"salt {i}"), [], [1, 2]))
    known.step()
    assert len(known._texts) == past.MOST_COMING - len(known._coming) == past.ANSWERS_AT_ONCE


@pytest.mark.parametrize("namespace", [None, "other"])
def test_an_answer_that_was_given_before_takes_few_steps_in_its_namespace(tiny: Path, namespace: str | None) -> None:
    engine, ids = Harness(tiny, speculative_algorithm="NGRAM"), prompt(4, 30)
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3}
    first = engine.generate("a", ids, **options)
    before = engine.steps
    engine.submit("b", ids, namespace=namespace, **options)
    engine.run()
    assert engine.tokens("b") == first
    assert (engine.steps - before < 30) is (namespace is None)


@pytest.mark.parametrize("what", ["flush", "sleep", "update"])
def test_nothing_is_known_of_answers_before_a_flush_a_sleep_or_new_weights(tiny: Path, what: str) -> None:
    messages: dict[str, list[Any]] = {
        "flush": [FlushReq("f")],
        "sleep": [SleepReq("s", 1), WakeReq("w")],
        "update": [UpdateWeightsReq("u", str(tiny))],  # which fails, since these weights are random
    }
    engine, ids = Harness(tiny, speculative_algorithm="NGRAM"), prompt(4, 30)
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3}
    first = engine.generate("a", ids, **options)
    known = engine._speculation._past  # type: ignore[union-attr]
    assert known is not None
    assert known._texts or known._coming
    engine.inbox += messages[what]
    engine.run()
    assert not known._texts
    assert not known._coming
    before = engine.steps
    assert engine.generate("b", ids, **options) == first
    assert engine.steps - before > 50
