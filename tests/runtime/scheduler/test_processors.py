"""Requests' logit processors: called once for each token, without an effect on other requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processors import CALLS, Fails, Favours, Follows, follow
from support.runtime_constraints import Constrained, Toy, alternating, obeys, only
from support.runtime_engine import VOCAB, Harness, Memory, prompt
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.engine import Engine, GenerationError
from treeline_runtime.messages import CustomProcessor, Grammar, SamplingParams
from treeline_runtime.sampling.processor import BUILT_IN
from treeline_runtime.scheduler import start
from treeline_runtime.scheduler.launched import NOT_FINITE, NOTHING_ALLOWED, NOTHING_SOUND
from treeline_runtime.scheduler.processors import NO_PROCESSORS, NONE_THERE, Processors

TINY_MODEL = Path(__file__).parents[3] / "models" / "tiny"
PROCESSORS = {"follows": Follows, "favours": Favours, "fails": Fails, **BUILT_IN}


def wants(name: str, **params: Any) -> dict[str, Any]:
    return {"logit_processor": CustomProcessor.of(name, params)}


ASKED: dict[str, tuple[list[int], Any, dict[str, Any]]] = {
    "greedy": (prompt(1, 6), None, {"max_new_tokens": 9, **wants("follows", key="greedy")}),
    "free": (prompt(5, 12), None, {"max_new_tokens": 11, "temperature": 0.8, "seed": 3}),
    "drawn": (
        prompt(2, 43),
        None,
        {"max_new_tokens": 12, "temperature": 1.5, "seed": 8, "top_p": 0.9, **wants("follows", key="drawn")},
    ),
    "bound": (prompt(8, 30), alternating, {"max_new_tokens": 7}),
    "both": (prompt(2, 43)[:36], alternating, {"max_new_tokens": 7, **wants("favours", token=7)}),
    "punished": (prompt(7, 5), None, {"max_new_tokens": 9, "repetition_penalty": 1.9, **wants("follows", key="p")}),
    "plain": (prompt(9, 8), None, {"max_new_tokens": 7}),
}


class Engines(Constrained):
    def __init__(self, model: Path, **settings: Any) -> None:
        super().__init__(model, processors=PROCESSORS, **settings)


def ask_everybody(engine: Constrained, **options: Any) -> Constrained:
    for rid, (ids, rule, own) in ASKED.items():
        engine.ask(rid, ids, Toy(rule) if rule else None, **(own | options))
    return engine


@pytest.fixture(autouse=True)
def calls() -> dict[str, list[list[int]]]:
    CALLS.clear()
    return CALLS


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, list[int]]:
    """The tokens of each request when it runs alone, without overlap."""
    found = {}
    for rid, (ids, rule, options) in ASKED.items():
        engine = Engines(tiny, overlap_depth=0)
        engine.ask(rid, ids, Toy(rule) if rule else None, **options)
        engine.run()
        found[rid] = engine.tokens(rid)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing in flight": {"overlap_depth": 0},
    "one in flight": {"overlap_depth": 1},
    "chunks": {"overlap_depth": 1, "chunked_prefill_size": 16, "max_running_requests": 4},
    "mixed chunks": {"overlap_depth": 1, "chunked_prefill_size": 16, "mixed_chunk": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_requests_get_the_same_tokens_together_as_alone(
    tiny: Path, alone: dict[str, list[int]], calls: dict[str, list[list[int]]], settings: dict[str, Any]
) -> None:
    engine = ask_everybody(Engines(tiny, **settings))
    engine.run()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone
    for rid, key in (("greedy", "greedy"), ("drawn", "drawn"), ("punished", "p")):
        output = alone[rid]
        assert calls[key] == [output[:i] for i in range(len(output))], "once for each token, with those before"
        assert all(token in follow(last, VOCAB) for last, token in zip([0, *output], output, strict=False))
    without = Harness(tiny)
    for rid in ("free", "plain"):
        assert without.generate(rid, ASKED[rid][0], **ASKED[rid][2]) == alone[rid]


def test_a_mask_comes_after_the_processor(tiny: Path, alone: dict[str, list[int]]) -> None:
    """The token that it favours is odd, so it is forbidden every second time."""
    assert obeys(alone["both"], alternating)
    assert alone["both"][1::2] == [7, 7, 7]


def test_penalties_and_biases_come_after_it(tiny: Path) -> None:
    engine = Engines(tiny)
    bias = {"logit_bias": {7: -torch.inf}}
    engine.submit("a", prompt(1, 5), **wants("favours", token=7), **bias, max_new_tokens=3)
    engine.submit("b", prompt(1, 5), **wants("favours", token=7), min_new_tokens=3, stop_token_ids=(7,))
    engine.run()
    assert engine.tokens("a") == Harness(tiny).generate("a", prompt(1, 5), **bias, max_new_tokens=3)
    assert engine.tokens("b")[3:] == [7]


def test_logprobs_are_the_models_own(tiny: Path) -> None:
    engine = Engines(tiny, overlap_depth=1)
    engine.submit("a", prompt(1, 5), **wants("favours", token=7), max_new_tokens=3, return_logprob=True)
    engine.run()
    scores = Harness(tiny)
    scores.generate(
        "a", [*prompt(1, 5), 7, 7, 7], max_new_tokens=0, return_logprob=True, logprob_start_len=5, top_logprobs_num=1
    )
    expected = scores.last("a").input_token_logprobs
    assert expected is not None
    assert [p for p, _ in engine.logprobs("a")] == pytest.approx([p for p, _ in expected], abs=1e-4)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.deep), 1])
def test_a_processor_is_also_called_for_forced_tokens(calls: dict[str, list[list[int]]], depth: int) -> None:
    class Watches:
        def __init__(self, params: dict[str, Any], vocab_size: int) -> None: ...

        def __call__(self, output_ids: Any, logits: torch.Tensor) -> None:
            calls["watches"].append(list(output_ids))

    settings: dict[str, Any] = {"load_format": "auto", "max_total_tokens": 2048, "page_size": 16}
    engine = Harness(TINY_MODEL, processors={"watches": Watches}, overlap_depth=depth, **settings)
    try:
        forced = Grammar("choice", '["Paris, Texas, is not the capital of France"]')
        output = engine.generate("a", prompt(1, 5), grammar=forced, max_new_tokens=40, **wants("watches"))
    finally:
        engine.grammars.close()
    assert len(output) > 3
    assert calls["watches"] == [output[:i] for i in range(len(output))]


# ---- how it ends --------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, str]] = {
    "raises": ("raises", "logit processor 'fails' failed: RuntimeError('as told')"),
    "exits": ("exits", "logit processor 'fails' failed: SystemExit(3)"),
    "nan": ("nan", NOTHING_SOUND.format("fails")),
    "infinite": ("infinite", NOTHING_SOUND.format("fails")),
    "nothing": ("nothing", NOTHING_SOUND.format("fails")),
    "another": ("another", "must change the logits in place"),
    "grown": ("grown", "must keep the logits' shape"),
}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 1, "top_k": 9}], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("after", "depth"), [(0, 1), (2, 0), (2, 1)])
def test_a_failure_ends_one_request_with_the_reason(
    tiny: Path, alone: dict[str, list[int]], after: int, depth: int, options: dict[str, Any]
) -> None:
    engine = Engines(tiny, overlap_depth=depth, max_running_requests=24)
    for name, (how, _) in FAULTS.items():
        for rule in (None, alternating):
            toy = Toy(rule) if rule else None
            rid = f"{name} {toy is not None}"
            engine.ask(rid, prompt(20, 8), toy, **wants("fails", how=how, after=after), max_new_tokens=9, **options)
    ask_everybody(engine).run()
    for name, (_, reason) in FAULTS.items():
        for rid in (f"{name} True", f"{name} False"):
            assert reason in engine.fault(rid)
            finish = engine.finish(rid)
            assert finish.status == 500
            assert len(engine.tokens(rid)) == after
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone


def test_a_processor_that_forbids_everything_is_an_error(tiny: Path) -> None:
    engine = Engines(tiny, overlap_depth=1)
    everything = [i for i in range(VOCAB) if i != 6]
    engine.ask("a", prompt(1, 5), Toy(only(5)), **wants("disallowed_tokens", token_ids=everything))
    engine.run()
    assert engine.fault("a") == NOTHING_ALLOWED


def test_the_models_own_nan_is_not_the_processors_fault(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engines(tiny)
    engine.spoil_logits(monkeypatch, slice(None))
    engine.submit("a", prompt(1, 5), **wants("favours", token=7))
    engine.run()
    assert engine.fault("a") == NOT_FINITE


def refusal(engine: Harness, wanted: dict[str, Any], **options: Any) -> tuple[int | None, str]:
    engine.generate("r", prompt(1, 5), **wanted, **options)
    finish = engine.outs.pop("r")[-1].finish
    assert finish is not None
    assert finish.type == "error"
    return finish.status, finish.message or ""


def test_a_processor_that_cannot_start_is_refused_before_any_computation(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engines(tiny)
    monkeypatch.setattr(engine, "_compute", lambda _: pytest.fail("launched"))
    for wanted, status, words in (
        (
            wants("favours", token=VOCAB),
            400,
            f"logit processor 'favours': token is an id below {VOCAB}",
        ),
        (wants("disallowed_tokens", token_ids=[VOCAB]), 400, f"token id {VOCAB} is not below {VOCAB}"),
        (wants("unheard"), 400, "no logit processor 'unheard', only follows, favours, fails, disallowed_tokens"),
        ({"logit_processor": CustomProcessor("favours", "[1]")}, 400, "Expected `object`, got `array`"),
        ({"logit_processor": CustomProcessor("favours", "nonsense")}, 400, "malformed"),
        (wants("follows"), 500, "failed to begin: KeyError('key')"),
        (wants("fails", how="begins", after=0), 500, "failed to begin: ArithmeticError('as told')"),
    ):
        found, said = refusal(engine, wanted)
        assert (found, words in said) == (status, True), said
    assert refusal(Harness(tiny), wants("favours", token=1)) == (400, NONE_THERE)


def test_a_refused_request_takes_no_place_in_the_queue(tiny: Path) -> None:
    """A full queue evicts its least urgent request, but not for one that would be refused anyway."""
    engine = Engines(tiny, max_running_requests=1, max_queued_requests=1, schedule_policy="priority")
    engine.submit("runs", prompt(1, 5))
    engine.step()
    engine.submit("waits", prompt(2, 5))
    engine.submit("wrong", prompt(3, 5), priority=9, **wants("favours", token=-1))
    engine.run()
    finish = engine.finish("wrong")
    assert finish.status == 400
    assert len(engine.tokens("waits")) == 8


# ---- what else may happen -----------------------------------------------------------------------------------


def test_a_request_may_end_at_every_point(tiny: Path, alone: dict[str, list[int]]) -> None:
    for point in range(1, 24, 3):
        CALLS.clear()
        engine = ask_everybody(Engines(tiny, overlap_depth=1, chunked_prefill_size=16))
        for _ in range(point):
            engine.step()
        engine.abort("drawn")
        engine.run()
        for rid, tokens in alone.items():
            found = engine.tokens(rid)
            assert found == (tokens[: len(found)] if rid == "drawn" else tokens), f"{rid} at step {point}"
        assert CALLS["drawn"] == [alone["drawn"][:i] for i in range(len(CALLS["drawn"]))]
        assert len(CALLS["drawn"]) <= len(engine.tokens("drawn")) + 1


@pytest.mark.parametrize("depth", [0, 1])
def test_retraction_calls_a_processor_for_no_token_twice(
    tiny: Path, calls: dict[str, list[list[int]]], depth: int
) -> None:
    calm, engine = Engines(tiny), Engines(tiny, overlap_depth=depth, max_total_tokens=96)
    engine.ratio.value = engine.ratio.initial = engine.ratio.minimum = 0.0
    for i in range(5):
        for one in (calm, engine):
            key = {"key": f"{i} {one is calm}"}
            one.submit(str(i), prompt(i, 9), max_new_tokens=40, temperature=1.3, seed=i, **wants("follows", **key))
    calm.run()
    engine.run()
    assert any(engine.last(str(i)).retractions for i in range(5))
    for i in range(5):
        output = calm.tokens(str(i))
        assert engine.tokens(str(i)) == output
        assert calls[f"{i} False"] == calls[f"{i} True"] == [output[:k] for k in range(40)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_launch_is_repeated_request_by_request(tiny: Path, alone: dict[str, list[int]], depth: int) -> None:
    engine = ask_everybody(Engines(tiny, overlap_depth=depth))
    engine.run_with_failing_launches()
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone
    assert len(CALLS["drawn"]) == len(alone["drawn"])


def test_a_row_that_cannot_be_sampled_asks_no_processor_again(
    tiny: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engines(tiny, overlap_depth=1)
    row = engine.executor._row

    def failing(step: Any, j: int) -> Any:
        if step.plan.seeds[j] == 1234 and step.plan.indices[j] == 2:
            raise RuntimeError("no such row")
        return row(step, j)

    monkeypatch.setattr(engine.executor, "_row", failing)
    engine.submit("bad", prompt(20, 8), seed=1234, **wants("follows", key="bad"))
    ask_everybody(engine).run()
    assert "RuntimeError('no such row')" in engine.fault("bad")
    assert {rid: engine.tokens(rid) for rid in ASKED} == alone
    assert [len(CALLS[key]) for key in ("bad", "greedy")] == [3, len(alone["greedy"])]


# ---- at start -----------------------------------------------------------------------------------------------


def test_processors_named_at_start_are_imported() -> None:
    found = NO_PROCESSORS.with_named(
        ["mine=support.processors:Favours", "quiet=disallowed_tokens", "disallowed_tokens"]
    )
    for name, params in (
        ("mine", {"token": 1}),
        ("quiet", {"token_ids": [1]}),
        ("disallowed_tokens", {"token_ids": [1]}),
    ):
        assert getattr(found.begin(CustomProcessor.of(name, params), VOCAB), "name", None) == name


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["a=no.such.module:X"], "cannot import no.such.module: ModuleNotFoundError: No module named 'no'"),
        (["a=support.nothing:X"], "PYTHONPATH"),
        (["a=support.processors:Missing"], "no attribute 'Missing'"),
        (["a=support.processors:CALLS.x.y"], "no attribute 'x'"),
        (["a=support.processors:__name__"], "is not a class or function: str"),
        (["a=string:Formatter"], "must be callable with (params, vocab_size): too many positional"),
        (["unheard"], "there is no built-in 'unheard', only disallowed_tokens, thinking_budget"),
        (["thinking_budget", "thinking_budget=support.processors:Favours"], "two have the name 'thinking_budget'"),
        (["a b=x:y"], "expected NAME=module:attribute"),
        (["a=x:y:z"], "expected NAME=module:attribute"),
        (["=x:y"], "expected NAME=module:attribute"),
        ([""], "expected NAME=module:attribute"),
    ],
)
def test_a_missing_processor_ends_the_start_before_the_model_is_loaded(entries: list[str], words: str) -> None:
    config = SchedulerConfig(model="/no/model", logit_processor=tuple(entries))
    with pytest.raises(ConfigError) as caught:
        start(config, Memory())
    assert str(caught.value).startswith(f"--logit-processor {entries[-1]}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import nowhere_at_all", "1 +", "1 / 0"])
def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    name = f"failing_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot import {name}: "):
        Processors({}).with_named([f"a={name}:X"])


def test_the_engine_in_this_process_takes_classes_and_names(tiny: Path) -> None:
    given: dict[str, Any] = {"mine": Favours, "theirs": "support.processors:Favours", "quiet": "disallowed_tokens"}
    settings: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 256, "threads": 1}
    with Engine(tiny, logit_processors=given, logit_processor=("thinking_budget",), **settings) as engine:
        for name in ("mine", "theirs"):
            params = SamplingParams(max_new_tokens=3, logit_processor=CustomProcessor.of(name, {"token": 9}))
            assert engine.generate([1, 2, 3], params).token_ids == [9, 9, 9]
        budget = {"logit_processor": CustomProcessor.of("thinking_budget", {"thinking_budget": 2, "end_token_id": 4})}
        assert engine.generate([1, 2, 3], {"max_new_tokens": 3, **budget}).token_ids[2] == 4
        with pytest.raises(GenerationError, match="token is an id below"):
            engine.generate([1, 2, 3], SamplingParams(logit_processor=CustomProcessor("mine")))
        with pytest.raises(GenerationError, match="only mine, thinking_budget, theirs, quiet"):
            engine.generate([1, 2, 3], SamplingParams(logit_processor=CustomProcessor("other")))
