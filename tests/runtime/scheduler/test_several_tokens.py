"""A step may give a request several tokens, or none: the answer equals that of one at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runtime_constraints import Toy
from support.runtime_engine import VOCAB, Harness, prompt
from treeline_runtime.core import Batch, Req
from treeline_runtime.messages import GenerateReq, SamplingParams, TokenLogprob
from treeline_runtime.scheduler.launched import Launched, Sampled


def accepting(engine: Harness, known: dict[str, list[TokenLogprob]], counts: random.Random) -> None:
    """Make sampling steps give 0 to 5 of the known next tokens (a prompt at least one), as if they had been guessed."""
    compute = engine._compute

    def computing(batch: Batch) -> Launched:
        launched = compute(batch)
        result, indices = launched.result, dict(zip(batch.sampling, launched.plan.indices, strict=True))

        def several() -> list[Sampled]:
            results = result()
            for i, index in indices.items():
                most = counts.choice([0, 1, 1, 2, 5]) if launched.plan.decodes else counts.choice([1, 3])
                found = known[batch.reqs[i].rid][index : index + most]
                results[i].tokens = [token for _, token in found]
                results[i].logprobs, results[i].top_logprobs = found, [[one] for one in found]
            return results

        launched.result = several  # type: ignore[method-assign]
        return launched

    engine._compute = computing  # type: ignore[method-assign]


def guessing(engine: Harness, known: dict[str, list[TokenLogprob]], chance: random.Random) -> None:
    """Make decoding steps compute up to 4 guesses, of which the first few are right, if any, and give those with the
    token after them; the wrong guesses leave computed values in the way."""
    next_batch, compute = engine.decode.next_batch, engine._compute
    guesses: dict[Req, tuple[int, int]] = {}
    """The index of the step's first token in the output, and the number of right guesses."""

    def with_guesses(reqs: list[Req]) -> Batch:
        batch = next_batch(reqs)
        for i, (req, end) in enumerate(zip(batch.reqs, batch.ends, strict=True)):
            index, right = end - req.prompt_len, chance.choice([0, 0, 1, 2, 4])
            follow = [token for _, token in known[req.rid][index:]][: chance.choice([0, 2, 4])]
            if batch.samples[i] and engine.cache.missing_pages(req, end + len(follow)) <= engine.cache.available_pages:
                guessed = [token if j < right else (token + 1) % VOCAB for j, token in enumerate(follow)]
                engine.cache.extend(req, end + len(guessed))
                engine.table.write_tokens(req.row, end, guessed)
                batch.ends[i] += len(guessed)
                guesses[req] = index, min(right, len(guessed))
        return batch

    def computing(batch: Batch) -> Launched:
        launched = compute(batch)
        result, taken = launched.result, {i: guesses.pop(req) for i, req in enumerate(batch.reqs) if req in guesses}

        def accepted() -> list[Sampled]:
            results = result()
            for i, (index, right) in taken.items():
                found = known[batch.reqs[i].rid][index : index + right + 1]
                results[i].tokens = [token for _, token in found]
                results[i].logprobs, results[i].top_logprobs = found, [[one] for one in found]
            return results

        launched.result = accepted  # type: ignore[method-assign]
        return launched

    engine.decode.next_batch = with_guesses  # type: ignore[method-assign]
    engine._compute = computing  # type: ignore[method-assign]


def ask(engine: Harness, seed: int, stops: dict[str, int]) -> dict[str, list[int]]:
    """Submit prompts with a common beginning; some stop at a token, some are limited."""
    rng, prompts = random.Random(seed), dict[str, list[int]]()
    for i in range(5):
        ids = prompts[str(i)] = prompt(1, rng.randint(1, 50)) + prompt(50 + i, rng.randint(1, 20))
        options: dict[str, Any] = {"stop_token_ids": (stops[str(i)],)} if str(i) in stops else {}
        options["max_new_tokens"] = rng.choice([1, 4, 19, 40])
        engine.submit(str(i), ids, top_logprobs_num=1, return_logprob=True, **options)
    return prompts


@pytest.mark.parametrize("several_at_a_time", [accepting, guessing])
@settings(max_examples=20)
@given(
    depth=st.integers(0, 1), seed=st.integers(0, 1 << 16), page_size=st.sampled_from([1, 4, 16]), mixed=st.booleans()
)
def test_several_tokens_at_a_time_give_the_same_answer(
    tiny: Path,
    several_at_a_time: Callable[[Harness, dict[str, list[TokenLogprob]], random.Random], None],
    depth: int,
    seed: int,
    page_size: int,
    mixed: bool,
) -> None:
    options: dict[str, Any] = {"page_size": page_size, "mixed_chunk": mixed, "chunked_prefill_size": 32}
    options["max_total_tokens"] = 256  # retractions happen
    free = Harness(tiny, **options)
    prompts = ask(free, seed, {})
    free.run()
    known = {rid: free.logprobs(rid) for rid in free.outs}
    rng = random.Random(seed)
    stops = {rid: rng.choice(free.tokens(rid)) for rid in known if rng.random() < 0.5}
    plain, several = Harness(tiny, **options), Harness(tiny, overlap_depth=depth, **options)
    compute, next_batch = several._compute, several.decode.next_batch
    several_at_a_time(several, known, rng)
    for engine in (plain, several):
        ask(engine, seed, stops)
        engine.run()
    for rid in known:
        assert several.tokens(rid) == plain.tokens(rid)
        for (logprob, token), (expected, same) in zip(several.logprobs(rid), free.logprobs(rid), strict=False):
            assert token == same
            assert logprob == pytest.approx(expected, abs=1e-4)
        assert len(several.logprobs(rid)) == len(plain.tokens(rid))
        assert several.last(rid).finish == plain.last(rid).finish
        assert several.last(rid).completion_tokens == plain.last(rid).completion_tokens
    several._compute, several.decode.next_batch = compute, next_batch  # type: ignore[method-assign]
    # what is cached was computed: the next turn of a conversation is what it is where nothing is cached
    for rid in list(known)[:2]:
        turn = prompts[rid] + plain.tokens(rid)
        uncached = Harness(tiny, **options).generate(f"next {rid}", turn)
        assert several.generate(f"next {rid}", turn) == uncached


@given(
    tokens=st.lists(st.integers(1, 9), max_size=12),
    cuts=st.lists(st.integers(0, 5), max_size=12),
    stop=st.integers(1, 9),
    most=st.integers(1, 12),
    least=st.integers(0, 4),
)
def test_an_output_is_the_same_however_its_tokens_come(
    tokens: list[int], cuts: list[int], stop: int, most: int, least: int
) -> None:
    message = GenerateReq("a", [1, 2, 3], SamplingParams(stop_token_ids=(stop,), min_new_tokens=least))
    one, several = (Req.of(message, seed=0, eos_ids=(), max_new_tokens=most, arrival=0) for _ in range(2))
    for req in (one, several):
        req.constraint = Toy(lambda _: range(10))
    end = next((end for end in (one.take_tokens([token]) for token in tokens) if end is not None), None)
    found, taken = None, 0
    for count in [*cuts, len(tokens)]:
        found = several.take_tokens(tokens[taken : taken + count])
        if found is not None:
            break
        taken += count
        several.device_len = several.kv_len = len(several.tokens) + count
        several.roll_back(len(several.tokens) - 1)
        assert several.device_len == several.kv_len == len(several.tokens) - 1
        assert several.launched_tokens == several.output_len
    assert (several.tokens, found) == (one.tokens, end)
