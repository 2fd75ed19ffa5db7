"""Guesses change no answer: whatever is guessed, the output is the one of a token at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runtime_constraints import Constrained, Rule, Toy, alternating, follows, only
from support.runtime_engine import VOCAB, Harness, prompt
from support.runtime_grammars import WithGrammars
from support.runtime_graphs import ComputedGraphs
from treeline_runtime.messages import Grammar, Speculated, TokenOut
from treeline_runtime.published import Stored
from treeline_runtime.scheduler import drafting
from treeline_runtime.scheduler.drafting import Speculation
from treeline_runtime.scheduler.ngrams import Ngrams

ALWAYS = ((1, ((0.0, 4),)),)
"""Four guesses, however many were right."""


class Known:
    """Guesses what it was told beforehand, with errors."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], right: float, chance: random.Random) -> None:
        """answers: by prompt. right: the share of guesses that are."""
        self._answers = answers
        self._right = right
        self._chance = chance

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        found = next(answer for ids, answer in self._answers.items() if tuple(tokens[: len(ids)]) == ids)
        begun = len(tokens) - next(len(ids) for ids in self._answers if tuple(tokens[: len(ids)]) == ids)
        most = self._chance.choice([most, most, 1, 0]) if self._right < 1 else most
        follow = [*found[begun:], *range(most)][:most]
        return [token if self._chance.random() < self._right else (token + 1) % VOCAB for token in follow]


SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 5, "min_p": 0.05},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
    {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {7: 3.0, 8: -5.0}},
    {"temperature": 1.0, "bad_words": ((3,), (5, 6), *(((token, 9)) for token in range(20)))},
    {"temperature": 1.0, "allowed_token_ids": (2, 3, 5, 7, 11, 13)},
    {"temperature": 1.2, "stop_token_ids": tuple(range(0, VOCAB, 7)), "min_new_tokens": 5},
    {"stop_token_ids": tuple(range(0, VOCAB, 5))},
)
RULES: tuple[Rule | None, ...] = (None, None, alternating, follows, only(1, 2, 3, 4, 5, 6, 7, 8, 9))


def speculation_of(engine: Harness) -> Speculation:
    assert engine._speculation is not None
    return engine._speculation


def ask(engine: Constrained, seed: int, again: str = "") -> dict[str, list[int]]:
    """Submit prompts with a common beginning and all kinds of parameters. again: before their names."""
    rng, prompts = random.Random(seed), dict[str, list[int]]()
    for i in range(5):
        rid = f"{again}{i}"
        prompts[rid] = prompt(1, rng.randint(1, 50)) + prompt(50 + i, rng.randint(2, 20))
        options = dict(rng.choice(SAMPLING)) | {
            "seed": rng.randint(0, 99),
            "max_new_tokens": rng.choice([1, 4, 19, 40]),
        }
        options["min_new_tokens"] = min(options.get("min_new_tokens", 0), options["max_new_tokens"])
        rule = None if options.keys() & {"bad_words", "allowed_token_ids"} else rng.choice(RULES)
        toy = None if rule is None else Toy(rule)
        shows = rng.random() < 0.3
        engine.ask(
            rid, prompts[rid], toy, return_logprob=not shows, top_logprobs_num=2, return_hidden_states=shows, **options
        )
    return prompts


def hidden(out: TokenOut) -> Any:
    assert out.hidden_states is not None
    return np.frombuffer(out.hidden_states.data, "<f4").reshape(-1, out.hidden_states.size)


def assert_same(found: Harness, expected: Harness, rid: str, again: str = "") -> None:
    assert found.tokens(again + rid) == expected.tokens(rid)
    one, other = found.last(again + rid), expected.last(rid)
    assert (one.finish, one.completion_tokens) == (other.finish, other.completion_tokens)
    assert len(found.logprobs(again + rid)) == len(expected.logprobs(rid))
    for (logprob, token), (same, also) in zip(found.logprobs(again + rid), expected.logprobs(rid), strict=True):
        assert token == also
        assert logprob == pytest.approx(same, abs=1e-4)
    if one.hidden_states is not None and other.hidden_states is not None:  # what was cached first may differ
        first = max(one.hidden_states.first, other.hidden_states.first)
        ours, theirs = (hidden(out)[first - out.hidden_states.first :] for out in (one, other))  # type: ignore[union-attr]
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def assert_only_real_tokens_are_cached(engine: Harness, prompts: Mapping[str, list[int]]) -> None:
    """Check every page that was ever announced."""
    real = [ids + engine.tokens(rid) for rid, ids in prompts.items()]
    size = engine.config.page_size
    paths: dict[int | None, list[int]] = {None: []}
    for event in (event for update in engine.updates for event in update.events if isinstance(event, Stored)):
        path = paths[event.parent_hash]
        for i, digest in enumerate(event.block_hashes):
            path = paths[digest] = path + event.token_ids[i * size : (i + 1) * size]
        assert any(ids[: len(path)] == path for ids in real)
    assert len(paths) > 1


@settings(max_examples=15)
@given(
    depth=st.integers(0, 1),
    seed=st.integers(0, 1 << 16),
    page_size=st.sampled_from([1, 4, 16]),
    mixed=st.booleans(),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    retracts=st.booleans(),
)
def test_answers_are_the_same_whatever_is_guessed(
    tiny: Path, depth: int, seed: int, page_size: int, mixed: bool, right: float, retracts: bool
) -> None:
    options: dict[str, Any] = {"page_size": page_size, "mixed_chunk": mixed, "chunked_prefill_size": 32}
    options |= {"max_total_tokens": 256, "enable_return_hidden_states": True}
    plain = Constrained(tiny, **options)
    prompts = ask(plain, seed)
    plain.run()
    answers = {tuple(ids): plain.tokens(rid) for rid, ids in prompts.items()}
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "DEPTHS", ALWAYS)
        patch.setattr(drafting, "WAIT", -1.0)
        guessing = Constrained(tiny, overlap_depth=depth, speculative_algorithm="NGRAM", **options)
        speculation_of(guessing)._new_drafter = lambda _: Known(answers, right, rng)
        ask(guessing, seed)
        while guessing.step():
            if retracts and rng.random() < 0.1:
                guessing.retract_one(rng)
        guessing.run()
        for rid in prompts:
            assert_same(guessing, plain, rid)
        assert_only_real_tokens_are_cached(guessing, prompts)
        # with past answers they are the same again
        speculation = speculation_of(guessing)
        assert speculation._past is not None
        speculation._new_drafter = speculation._past.drafter
        ask(guessing, seed, "again ")
        guessing.run()
        for rid in prompts:
            assert_same(guessing, plain, rid, "again ")
        # with the cache and guesses, the next turn is what it is without either
        for rid, ids in list(prompts.items())[:2]:
            turn = ids + plain.tokens(rid) + ids[:7]
            uncached = Harness(tiny, **options)
            assert guessing.generate(f"next {rid}", turn, max_new_tokens=12) == uncached.generate(
                rid, turn, max_new_tokens=12
            )


# ---- one by one -------------------------------------------------------------------------------------------


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every request that decodes have four guesses."""
    monkeypatch.setattr(drafting, "DEPTHS", ALWAYS)
    monkeypatch.setattr(drafting, "WAIT", -1.0)


ASKED = {str(i): prompt(i, 9 + 4 * i) for i in range(3)}
MOST = 24


def plain_answers(tiny: Path, **options: Any) -> dict[tuple[int, ...], list[int]]:
    engine = Harness(tiny)
    return {tuple(ids): engine.generate(rid, ids, max_new_tokens=MOST, **options) for rid, ids in ASKED.items()}


def guessing(
    tiny: Path, answers: Mapping[tuple[int, ...], Sequence[int]], right: float = 1.0, **settings: Any
) -> Harness:
    engine = Harness(tiny, speculative_algorithm="NGRAM", **settings)
    speculation_of(engine)._new_drafter = lambda _: Known(answers, right, random.Random(0))
    return engine


def test_right_guesses_take_fewer_steps_and_are_counted(tiny: Path, always: None) -> None:
    answers = plain_answers(tiny)
    engine = guessing(tiny, answers)
    for rid, ids in ASKED.items():
        assert engine.generate(rid, ids, max_new_tokens=MOST) == answers[tuple(ids)]
        # the first token comes with the prompt; then there are five in a step, and three in the last
        assert engine.last(rid).speculated == Speculated(5, 4 * 4 + 2, 4 * 4 + 2)
    assert engine.steps < 3 * 8
    load = engine.load()
    assert (load.total_drafts, load.total_draft_tokens) == (15, 54)
    assert load.accepted_per_position == [15, 15, 12, 12]


def test_wrong_guesses_are_counted_and_give_way(tiny: Path) -> None:
    answers = plain_answers(tiny)
    engine = guessing(tiny, answers, right=0.0)
    ids = ASKED["0"]
    assert engine.generate("a", ids, max_new_tokens=MOST) == answers[tuple(ids)]
    speculated = engine.last("a").speculated
    assert speculated is not None
    assert 0 < speculated.steps < 15, "then nothing more is guessed"
    assert speculated.right == 0
    assert engine.load().accepted_per_position == []


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_may_be_aborted_at_every_point(tiny: Path, always: None, depth: int) -> None:
    """The harness asserts after every step that the accounts balance."""
    answers = plain_answers(tiny)
    for point in range(9):
        engine = guessing(tiny, answers, right=0.8, overlap_depth=depth)
        for rid, ids in ASKED.items():
            engine.submit(rid, ids, max_new_tokens=MOST)
        for _ in range(point):
            engine.step()
        engine.abort("1")
        engine.run()
        for rid in ("0", "2"):
            assert engine.tokens(rid) == answers[tuple(ASKED[rid])]
        found = engine.tokens("1")
        assert found == answers[tuple(ASKED["1"])][: len(found)]
        assert_only_real_tokens_are_cached(engine, ASKED)


def test_launches_that_fail_are_repeated_with_their_guesses(tiny: Path, always: None) -> None:
    answers = plain_answers(tiny)
    engine = guessing(tiny, answers, right=0.7)
    for rid, ids in ASKED.items():
        engine.submit(rid, ids, max_new_tokens=MOST)
    engine.run_with_failing_launches()
    assert {rid: engine.tokens(rid) for rid in ASKED} == {rid: answers[tuple(ids)] for rid, ids in ASKED.items()}


@pytest.mark.parametrize("fails", ["accept", "fill"])
@pytest.mark.parametrize("right", [1.0, 0.6])
def test_a_fault_after_right_guesses_comes_after_their_tokens(
    tiny: Path, always: None, fails: str, right: float
) -> None:
    ids, found = ASKED["2"], list[Any]()
    free = Constrained(tiny)
    free.ask("a", ids, Toy(alternating), max_new_tokens=MOST)
    free.run()
    for settings_ in ({}, {"speculative_algorithm": "NGRAM"}):
        engine = Constrained(tiny, **settings_)
        if engine._speculation is not None:
            engine._speculation._new_drafter = lambda _: Known({tuple(ids): free.tokens("a")}, right, random.Random(1))
        engine.ask("a", ids, Toy(alternating, fails=fails, after=8), max_new_tokens=MOST)
        engine.run()
        found.append((engine.tokens("a"), engine.fault("a")))
    assert found[0] == found[1]
    assert len(found[0][0]) == 8


def test_steps_with_guesses_replay_graphs(tiny: Path, always: None) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "frequency_penalty": 1.0, "seed": 3}):
        answers = plain_answers(tiny, **options)
        engine = guessing(tiny, answers, right=0.8, overlap_depth=1)
        graphs = ComputedGraphs(engine.executor, 64)
        engine.executor._graphs = graphs  # type: ignore[assignment]
        for rid, ids in ASKED.items():
            engine.submit(rid, ids, max_new_tokens=MOST, **options)
        engine.run()
        assert {rid: engine.tokens(rid) for rid in ASKED} == {rid: answers[tuple(ids)] for rid, ids in ASKED.items()}
        assert graphs.of_several >= 4


def test_steps_without_guesses_overlap(tiny: Path) -> None:
    engine = Harness(tiny, speculative_algorithm="NGRAM", overlap_depth=1)
    engine.submit("a", list(range(40)), max_new_tokens=5, temperature=1.5, seed=1)
    while engine.step():
        if "a" in engine.decode.running and engine.decode.running["a"].drafting is not None:
            assert engine.decode.running["a"].drafting.expected is None, "nothing is repeated"
            assert engine._pending or engine.decode.running["a"].launched_tokens == 5
    engine.run()


def test_guesses_end_with_the_context(tiny: Path, always: None) -> None:
    ids, sizes = prompt(9, 41), {"context_length": 64, "max_total_tokens": 64}
    plain = Harness(tiny, **sizes).generate("a", ids, max_new_tokens=100)
    assert len(plain) == 64 - 41
    engine = guessing(tiny, {tuple(ids): [*plain, 1, 2, 3, 4, 5]}, **sizes)
    assert engine.generate("a", ids, max_new_tokens=100) == plain
    assert engine.finish("a").type == "length"
    assert engine.steps < 10


def test_simulated_guesses_save_steps_and_keep_the_length(tiny: Path) -> None:
    engine = Harness(tiny, speculative_simulate_acceptance=1.0, speculative_num_draft_tokens=3)
    assert len(engine.generate("a", prompt(1, 9), max_new_tokens=41)) == 41
    assert engine.steps < 16, "four tokens in a step"
    never = Harness(tiny, speculative_simulate_acceptance=0.0)
    assert len(never.generate("a", prompt(1, 9), max_new_tokens=41)) == 41
    assert never.steps > 38


def test_scarce_guesses_are_divided_among_all(tiny: Path, always: None) -> None:
    """Who began first takes no more of a step's room than others."""
    prompts = [prompt(i, 9) for i in range(6)]
    plain = Harness(tiny)
    answers = {tuple(ids): plain.generate(str(i), ids, max_new_tokens=40) for i, ids in enumerate(prompts)}
    made = guessing(tiny, answers, chunked_prefill_size=32)  # half of it for a step of six requests: ten guesses
    for i, ids in enumerate(prompts):
        made.submit(str(i), ids, max_new_tokens=40)
    for _ in range(9):
        made.step()
    counts = [req.drafting.counts for req in made.decode.running.values()]  # type: ignore[union-attr]
    assert len(counts) == 6
    assert all(count is not None and count.right >= 5 for count in counts)
    made.run()
    assert [made.tokens(str(i)) for i in range(6)] == list(answers.values())


def test_drafters_are_not_asked_where_no_guess_can_pay(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 4),)), (4, ())))
    asked, guess = list[int](), Ngrams.guess
    monkeypatch.setattr(Ngrams, "guess", lambda self, tokens, most: asked.append(most) or guess(self, tokens, most))
    made = Harness(tiny, speculative_algorithm="NGRAM")
    for i in range(5):
        made.submit(str(i), prompt(i, 9), max_new_tokens=60 if i < 2 else 20, logit_bias={7: 99.0})
    while len(made.decode.running) < 5:
        made.step()
    made.step()
    asked.clear()
    while len(made.decode.running) == 5:
        made.step()
    assert not asked
    made.run()
    assert max(asked) == 4
    assert made.last("0").speculated.right > 20  # type: ignore[union-attr]


def test_guesses_leave_room_for_prompts_in_mixed_steps(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 7),)),))
    again = {"logit_bias": {77: 99.0}, "ignore_eos": True, "max_new_tokens": 150}
    steps = []
    for algorithm in ("off", "NGRAM"):
        engine = Harness(
            tiny, speculative_algorithm=algorithm, mixed_chunk=True, chunked_prefill_size=64, page_size=1,
            context_length=512, max_total_tokens=4096,
        )  # fmt: skip
        for i in range(8):
            engine.submit(str(i), prompt(i, 9), **again)
        while len(engine.outs) < 8 or min(map(len, map(engine.tokens, engine.outs))) < 20:
            engine.step()
        begun = engine.steps
        engine.submit("late", prompt(9, 300), max_new_tokens=1)
        while "late" not in engine.outs:
            engine.step()
        steps.append(engine.steps - begun)
    assert steps[1] <= 2 * steps[0]


@pytest.mark.parametrize("acceptance", [0.9, 1.0])
def test_simulated_guesses_end_where_memory_does(tiny: Path, acceptance: float) -> None:
    engine = Harness(
        tiny, speculative_simulate_acceptance=acceptance, page_size=1, max_total_tokens=150, mixed_chunk=True
    )
    engine.ratio.initial = engine.ratio.minimum = engine.ratio.value = 0.0  # more are admitted than fit
    for i in range(5):
        engine.submit(str(i), prompt(i, 9), max_new_tokens=60)
    engine.run()
    assert [(len(engine.tokens(str(i))), engine.finish(str(i)).type) for i in range(5)] == [(60, "length")] * 5


# ---- grammars ---------------------------------------------------------------------------------------------

LISTS = Grammar("regex", "(red|green|blue), (red|green|blue), [a-f]{3,6}( and [a-f]{2})*")
EBNF = Grammar("ebnf", 'root ::= ("red" | "green" | "blue") (", " [a-f] [a-f] [a-f])*')
THOUGHT = Grammar("regex", "(yes|no)+", after="a")


@pytest.mark.parametrize("grammar", [LISTS, EBNF, THOUGHT], ids=["llguidance", "xgrammar", "after a marker"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("right", [1.0, 0.6])
def test_grammars_mask_the_token_after_each_guess(
    always: None, grammar: Grammar, temperature: float, right: float
) -> None:
    options: dict[str, Any] = {"grammar": grammar, "temperature": temperature, "seed": 5, "max_new_tokens": 30}
    prompts = {str(i): random.Random(i).choices(range(300, 4000), k=12) for i in range(3)}
    plain = WithGrammars(jump_forward=False)
    answers = {tuple(ids): plain.generate(rid, ids, **options) for rid, ids in prompts.items()}
    engine = WithGrammars(jump_forward=False, speculative_algorithm="NGRAM")
    speculation_of(engine)._new_drafter = lambda _: Known(answers, right, random.Random(2))
    for rid, ids in prompts.items():
        engine.submit(rid, ids, **options)
    engine.run()
    for rid, ids in prompts.items():
        assert engine.tokens(rid) == answers[tuple(ids)]
        assert engine.finish(rid) == plain.finish(rid)
    assert engine.stats.accepted_per_position[0] > 3


NAMES = [f"the_{name}_of_it" for name in ("size", "place", "time")]
FLAGS = Grammar(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {name: {"enum": [100, 200, "some", "none"]} for name in NAMES},
            "required": NAMES,
            "additionalProperties": False,
        }
    ),
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_leave_jumps_where_they_are(always: None, temperature: float) -> None:
    for seed in range(4):
        options: dict[str, Any] = {"grammar": FLAGS, "max_new_tokens": 80, "temperature": temperature, "seed": seed}
        ids = random.Random(seed).choices(range(300, 4000), k=12)
        plain = WithGrammars()
        answers = {tuple(ids): plain.generate("a", ids, **options)}
        engine = WithGrammars(speculative_algorithm="NGRAM")
        speculation_of(engine)._new_drafter = lambda _, answers=answers: Known(answers, 1.0, random.Random(0))  # type: ignore[misc]
        assert engine.generate("a", ids, **options) == plain.tokens("a")
        assert engine.stats.total_jumps == plain.stats.total_jumps > 0
        assert engine.stats.total_forced_tokens == plain.stats.total_forced_tokens


def test_forced_text_is_guessed_where_it_is_not_jumped_over() -> None:
    options: dict[str, Any] = {"grammar": FLAGS, "max_new_tokens": 80, "return_logprob": True}
    ids = random.Random(1).choices(range(300, 4000), k=12)
    plain, engine = WithGrammars(), WithGrammars(speculative_algorithm="NGRAM")
    assert engine.generate("a", ids, **options) == plain.generate("a", ids, **options)
    assert engine.stats.total_jumps == 0
    speculated = engine.last("a").speculated
    assert speculated is not None
    assert speculated.right > 3
