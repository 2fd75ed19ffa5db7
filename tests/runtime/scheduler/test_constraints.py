"""Constrained rows: launched with the others, sampled when their constraints know all earlier tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runtime_constraints import Constrained, Rule, Toy, alternating, anything, follows, obeys, only
from support.runtime_engine import VOCAB, Harness, prompt
from treeline_runtime.core import Batch
from treeline_runtime.messages import AbortReq, StopReq
from treeline_runtime.sampling import Row
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.forward import Tokens
from treeline_runtime.scheduler.launched import NOT_FINITE, NOTHING_ALLOWED, Choices, Launched, Step
from treeline_runtime.scheduler.plan import StepPlan

SEQUENCE = (90, 3, 3, 64, 31, 32, 0, 95)

ASKED: dict[str, tuple[list[int], Rule | None, dict[str, Any]]] = {
    "greedy": (prompt(1, 6), alternating, {"max_new_tokens": 9}),
    "free": (prompt(5, 12), None, {"max_new_tokens": 11, "temperature": 0.8, "seed": 3}),
    "drawn": (prompt(2, 43), follows, {"max_new_tokens": 12, "temperature": 1.5, "seed": 8}),
    "filtered": (
        prompt(3, 21),
        follows,
        {"max_new_tokens": 8, "temperature": 1.2, "seed": 1, "top_p": 0.7, "top_k": 9},
    ),
    "plain": (prompt(2, 43)[:36] + prompt(6, 4), None, {"max_new_tokens": 7}),
    "sequence": (prompt(4, 9), only(*SEQUENCE), {"max_new_tokens": 20}),
    "punished": (prompt(7, 5), alternating, {"max_new_tokens": 9, "repetition_penalty": 1.9, "frequency_penalty": 0.4}),
    "bound": (prompt(8, 30), only(5, 6, 7, 8), {"max_new_tokens": 3}),
    "adjusted": (prompt(9, 8), None, {"max_new_tokens": 6, "presence_penalty": 1.0, "temperature": 0.7, "seed": 4}),
}


def ask_everybody(engine: Constrained, **options: Any) -> Constrained:
    for rid, (ids, rule, own) in ASKED.items():
        engine.ask(rid, ids, Toy(rule) if rule else None, **(own | options))
    return engine


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, list[int]]:
    """The tokens of each request when it runs alone, without overlap."""
    found = {}
    for rid, (ids, rule, options) in ASKED.items():
        engine = Constrained(tiny, overlap_depth=0)
        engine.ask(rid, ids, Toy(rule) if rule else None, **options)
        engine.run()
        found[rid] = engine.tokens(rid)
    return found


def one_by_one(tiny: Path, ids: list[int], rule: Rule, count: int) -> list[int]:
    """Return the greedy output under a rule, without any constraint: each token is a request of its own, with forbidden
    tokens biased away."""
    engine, output = Harness(tiny), list[int]()
    for i in range(count):
        bias = {token: -torch.inf for token in range(VOCAB) if token not in rule(output)}
        output += engine.generate(str(i), ids + output, max_new_tokens=1, logit_bias=bias)
    return output


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing in flight": {"overlap_depth": 0},
    "one in flight": {"overlap_depth": 1},
    "three in flight": {"overlap_depth": 3},
    "chunks": {"overlap_depth": 1, "chunked_prefill_size": 16, "max_running_requests": 4},
    "mixed chunks": {"overlap_depth": 1, "chunked_prefill_size": 16, "mixed_chunk": True},
    "mixed, none in flight": {"overlap_depth": 0, "chunked_prefill_size": 16, "mixed_chunk": True},
    "many prefills": {"overlap_depth": 2, "chunked_prefill_size": 8, "prefills_in_a_row": 3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_requests_get_the_same_tokens_together_as_alone(
    tiny: Path, alone: dict[str, list[int]], settings: dict[str, Any]
) -> None:
    engine = ask_everybody(Constrained(tiny, **settings))
    engine.run()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone
    for rid, (_, rule, _) in ASKED.items():
        assert rule is None or obeys(alone[rid], rule), rid
        assert rule is None or engine.toys[rid].filled == list(range(len(alone[rid]))), "once for each token"
    assert alone["sequence"] == list(SEQUENCE)


@pytest.mark.parametrize("rid", ["greedy", "sequence"])
def test_a_greedy_output_is_the_likeliest_allowed_one(tiny: Path, alone: dict[str, list[int]], rid: str) -> None:
    ids, rule, _ = ASKED[rid]
    assert rule is not None
    assert alone[rid] == one_by_one(tiny, ids, rule, len(alone[rid]))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_constraint_that_allows_everything_changes_nothing(tiny: Path, depth: int) -> None:
    free, bound = Harness(tiny), Constrained(tiny, overlap_depth=depth)
    for rid, (ids, _, options) in ASKED.items():
        bound.ask(rid, ids, Toy(anything), **options)
        free.submit(rid, ids, **options)
    free.run()
    bound.run()
    assert {rid: bound.tokens(rid) for rid in ASKED} == {rid: free.tokens(rid) for rid in ASKED}


# ---- when ---------------------------------------------------------------------------------------------------


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The executor's calls, in order; batches are numbered as they are launched."""
    calls: list[str] = []
    numbers: dict[Launched, int] = {}
    launch, sample, result = Executor.launch, Executor.sample_delayed, Launched.result

    def launching(self: Executor, plan: StepPlan) -> Launched:
        launched = launch(self, plan)
        numbers[launched] = len(numbers)
        calls.append(f"launch {numbers[launched]}")
        return launched

    def sampling(self: Executor, launched: Launched, choices: Choices) -> None:
        calls.append(f"sample {numbers[launched]}")
        sample(self, launched, choices)

    def taking(self: Launched) -> Any:
        calls.append(f"take {numbers[self]}")
        return result(self)

    monkeypatch.setattr(Executor, "launch", launching)
    monkeypatch.setattr(Executor, "sample_delayed", sampling)
    monkeypatch.setattr(Launched, "result", taking)
    return calls


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_is_launched_before_the_result_of_the_one_before_is_taken(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    engine = Constrained(tiny, overlap_depth=depth)
    engine.ask("free", prompt(1, 5), max_new_tokens=3)
    engine.ask("bound", prompt(2, 5), Toy(follows), max_new_tokens=3)
    calls = recorded(monkeypatch)
    engine.run()
    steps = "launch 0, sample 0; launch 1, take 0, sample 1; launch 2, take 1, sample 2; take 2"
    assert calls == steps.replace(";", ",").split(", ")


def test_free_requests_are_sampled_as_they_are_launched(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Constrained(tiny, overlap_depth=1)
    for rid in ("free", "adjusted", "bound"):
        options: dict[str, Any] = {"frequency_penalty": 1.0} if rid == "adjusted" else {}
        engine.ask(rid, prompt(len(rid), 5), Toy(alternating) if rid == "bound" else None, **options)
    sample, seen = Executor.sample_delayed, list[dict[str, int]]()

    def looking(self: Executor, launched: Launched, choices: Choices) -> None:
        pool, batch = self._table.token_pool, engine._pending[-1][0]
        seen.append({req.rid: int(pool[req.row, end]) for req, end in zip(batch.reqs, batch.ends, strict=True)})
        sample(self, launched, choices)

    monkeypatch.setattr(Executor, "sample_delayed", looking)
    engine.run()
    for rid in ("free", "adjusted"):
        assert [there[rid] for there in seen] == engine.tokens(rid)
    assert [there["bound"] for there in seen] != engine.tokens("bound")


def test_a_batch_without_constrained_rows_is_sampled_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Constrained(tiny, overlap_depth=1, prefills_in_a_row=2)
    calls = recorded(monkeypatch)
    engine.ask("bound", prompt(2, 5), Toy(follows), max_new_tokens=2)
    engine.step()
    engine.ask("free", prompt(1, 5), max_new_tokens=1)
    engine.run()
    # 1 is the prompt of the free one
    assert calls == ["launch 0", "sample 0", "launch 1", "take 0", "launch 2", "take 1", "sample 2", "take 2"]
    assert len(engine.tokens("bound")) == 2


def test_results_are_read_before_the_next_launch_overwrites_them(
    tiny: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs overwrite logits and tokens in this way at the next replay."""
    engine = ask_everybody(Constrained(tiny, overlap_depth=1))
    choose = engine.executor._forward.choose
    logits, ids = torch.zeros(16, VOCAB), torch.zeros(16, dtype=torch.int64)
    finite = torch.zeros(16, dtype=torch.bool)

    def choosing(*args: Any) -> tuple[torch.Tensor, Tokens]:
        found, tokens = choose(*args)
        n = len(found)
        for there, new in ((logits, found), (ids, tokens.ids), (finite, tokens.finite)):
            there.copy_(torch.zeros_like(there))
            there[:n] = new
        return logits[:n], Tokens(ids[:n], finite[:n])

    read_back = Launched.read_back
    monkeypatch.setattr(engine.executor._forward, "choose", choosing)
    monkeypatch.setattr(  # on a GPU that is a copy
        Launched, "read_back", lambda self, *tensors: read_back(self, *(tensor.clone() for tensor in tensors))
    )
    engine.run()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone


# ---- how it ends --------------------------------------------------------------------------------------------


def test_a_finished_constraint_ends_its_request(tiny: Path) -> None:
    engine = Constrained(tiny, overlap_depth=1)
    engine.ask("a", prompt(1, 5), Toy(only(*SEQUENCE)), max_new_tokens=50)
    engine.run()
    finish = engine.finish("a")
    assert (finish.type, finish.matched) == ("stop", None)
    assert engine.last("a").completion_tokens == len(SEQUENCE)


def test_an_allowed_stop_token_ends_the_request(tiny: Path) -> None:
    engine = Constrained(tiny, overlap_depth=1)
    engine.ask("a", prompt(1, 5), Toy(only(*SEQUENCE)), max_new_tokens=50, stop_token_ids=(SEQUENCE[4],))
    engine.run()
    finish = engine.finish("a")
    assert (finish.type, finish.matched) == ("stop", SEQUENCE[4])
    assert engine.tokens("a") == list(SEQUENCE[:5])


FAULTS: dict[str, tuple[Callable[[], Toy], dict[str, Any], int, str]] = {
    "fill at once": (lambda: Toy(alternating, fails="fill"), {}, 0, "RuntimeError('fill fails as told')"),
    "fill later": (lambda: Toy(alternating, fails="fill", after=3), {}, 3, "RuntimeError('fill fails as told')"),
    "accept": (lambda: Toy(alternating, fails="accept", after=2), {}, 2, "RuntimeError('accept fails as told')"),
    "nothing allowed": (lambda: Toy(only(), ends=False), {}, 0, NOTHING_ALLOWED),
    "nothing allowed later": (lambda: Toy(only(7, 8), ends=False), {}, 2, NOTHING_ALLOWED),
    "nothing to draw": (lambda: Toy(only(7), ends=False), {"temperature": 1.0}, 1, NOTHING_ALLOWED),
    "nothing to filter": (lambda: Toy(only(7), ends=False), {"temperature": 1.0, "top_p": 0.5}, 1, NOTHING_ALLOWED),
    "all of it biased away": (lambda: Toy(only(7, 8)), {"logit_bias": {8: -torch.inf}}, 1, NOTHING_ALLOWED),
    "only an end, too early": (
        lambda: Toy(only(7, 8)),
        {"stop_token_ids": (8,), "min_new_tokens": 4},
        1,
        NOTHING_ALLOWED,
    ),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_ends_one_request_with_the_reason(
    tiny: Path, alone: dict[str, list[int]], fault: str, depth: int
) -> None:
    toy, options, taken, reason = FAULTS[fault]
    engine = Constrained(tiny, overlap_depth=depth)
    engine.ask("bad", prompt(20, 8), toy(), **({"max_new_tokens": 9} | options))
    ask_everybody(engine)
    engine.run()
    assert reason in engine.fault("bad")
    assert len(engine.tokens("bad")) == taken
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rule", [alternating, only()])
def test_non_finite_logits_are_an_error_under_any_constraint(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, depth: int, rule: Rule
) -> None:
    expected = Harness(tiny).generate("x", prompt(1, 5), max_new_tokens=6)
    engine = Constrained(tiny, overlap_depth=depth)
    engine.spoil_logits(monkeypatch, slice(1, 2))  # which is forbidden
    engine.ask("good", prompt(1, 5), max_new_tokens=1)
    engine.ask("bad", prompt(2, 5), Toy(rule, ends=False))
    engine.run()
    assert engine.fault("bad") == NOT_FINITE
    assert engine.tokens("good") == expected[:1]


def test_a_row_that_cannot_be_sampled_is_found_among_the_others(
    tiny: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Constrained(tiny, overlap_depth=1)
    row = engine.executor._row

    def failing(step: Step, j: int) -> Row:
        if step.plan.seeds[j] == 1234 and step.plan.indices[j] == 2:
            raise RuntimeError("no such row")
        return row(step, j)

    monkeypatch.setattr(engine.executor, "_row", failing)
    engine.ask("bad", prompt(20, 8), Toy(alternating), seed=1234)
    ask_everybody(engine).run()
    assert "RuntimeError('no such row')" in engine.fault("bad")
    assert len(engine.tokens("bad")) == 2
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone


def test_a_failed_transfer_of_results_ends_only_its_batch(
    tiny: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Constrained(tiny, overlap_depth=1)
    engine.ask("bound", prompt(1, 5), Toy(alternating))
    engine.ask("free", prompt(2, 5))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_read_back", lambda *_: 1 / 0)
        engine.step()
    engine.run()
    for rid in ("bound", "free"):
        assert "ZeroDivisionError" in engine.fault(rid)
    engine = ask_everybody(engine.__class__(tiny, overlap_depth=1))
    engine.run()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_launch_is_repeated_request_by_request(tiny: Path, alone: dict[str, list[int]], depth: int) -> None:
    """Each request is sampled before the next is launched, by constraints that know the step before."""
    engine = ask_everybody(Constrained(tiny, overlap_depth=depth))
    engine.run_with_failing_launches()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone


def test_requests_that_end_during_a_repeated_launch_are_skipped(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling the first request takes the results of the step before, among them the other's last token."""
    engine = Constrained(tiny, overlap_depth=1)
    engine.ask("first", prompt(1, 5), Toy(alternating), max_new_tokens=6)
    engine.ask("ends", prompt(2, 5), Toy(only(5, 6, 7)), max_new_tokens=6)
    launch, alone = engine._compute, list[str]()

    def flaky(batch: Batch) -> Launched:
        if len(batch.reqs) > 1 and engine.steps == 3:
            raise RuntimeError("not both of them at once")
        if engine.steps == 3:
            alone.extend(req.rid for req in batch.reqs)
        return launch(batch)

    monkeypatch.setattr(engine, "_compute", flaky)
    engine.run()
    assert alone == ["first"]
    assert engine.tokens("ends") == [5, 6, 7]
    assert len(engine.tokens("first")) == 6


# ---- what else may happen -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("drawn", "abort"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (("drawn", "stop"), ("greedy", "abort"), ("plain", "abort"), ("drawn", "abort all"))
        ),
    ],
)
def test_a_request_may_end_at_every_point(tiny: Path, alone: dict[str, list[int]], victim: str, how: str) -> None:
    """After every step the harness asserts that constraints got exactly their requests' tokens."""
    for point in range(1, 30, 2):
        engine = ask_everybody(Constrained(tiny, overlap_depth=1, chunked_prefill_size=16, max_running_requests=5))
        for _ in range(point):
            engine.step()
        message = StopReq(victim, "x") if how == "stop" else AbortReq(victim if how == "abort" else "")
        engine.inbox.append(message)
        engine.run()
        for rid, tokens in alone.items():
            found = engine.tokens(rid)
            if rid == victim or how == "abort all":
                assert found == tokens[: len(found)], f"{rid} at step {point}"
            else:
                assert found == tokens, f"{rid} at step {point}"


@pytest.mark.parametrize("depth", [0, 1])
def test_logprobs_are_the_models_under_any_constraint(tiny: Path, depth: int) -> None:
    engine = ask_everybody(Constrained(tiny, overlap_depth=depth), return_logprob=True, top_logprobs_num=3)
    engine.run()
    for rid, (ids, _, _) in ASKED.items():
        output = engine.tokens(rid)
        scores = Harness(tiny)
        options: dict[str, Any] = {"logprob_start_len": len(ids), "top_logprobs_num": 3}
        scores.generate(rid, ids + output, max_new_tokens=0, return_logprob=True, **options)
        expected = scores.last(rid)
        assert expected.input_token_logprobs is not None
        assert expected.input_top_logprobs is not None
        found = engine.logprobs(rid)
        assert [token for _, token in found] == output
        assert [p for p, _ in found] == pytest.approx([p for p, _ in expected.input_token_logprobs], abs=1e-4)
        tops = [top for out in engine.outs[rid] for top in out.output_top_logprobs or ()]
        for top, theirs in zip(tops, expected.input_top_logprobs, strict=True):
            assert top is not None
            assert theirs is not None
            assert [p for p, _ in top] == pytest.approx([p for p, _ in theirs], abs=1e-4)


def test_hidden_states_come_with_constrained_tokens(tiny: Path, alone: dict[str, list[int]]) -> None:
    engine = Constrained(tiny, overlap_depth=1, enable_return_hidden_states=True)
    ask_everybody(engine, return_hidden_states=True).run()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone
    for rid, (ids, _, _) in ASKED.items():
        states = engine.last(rid).hidden_states
        assert states is not None
        assert states.first + len(states.data) // (4 * states.size) == len(ids) + len(alone[rid]) - 1
