"""A step is computed from its plan alone: one made by hand, one sent as bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runtime_engine import Harness, prompt
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import load_model
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.plan import MICRO_BATCH_TOKENS, InputLogprobs, StepPlan, Writes
from treeline_runtime.scheduler.resolve import resolve

TINY_MODEL = Path(__file__).parents[3] / "models" / "tiny"
IDS = prompt(7, 21)
PAGES = [9, 2, 5, 11]
"""Pages of 8 tokens, in any order."""


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(SchedulerConfig(model=str(TINY_MODEL), dtype="float32"))


@pytest.fixture
def executor(model: Decoder) -> Executor:
    sizes = {"page_size": 8, "max_running_requests": 4, "context_length": 64, "max_total_tokens": 96}
    config = SchedulerConfig(model=str(TINY_MODEL), dtype="float32", **sizes)
    return Executor(config, model, resolve(config, model))


def as_bytes(plan: StepPlan) -> StepPlan:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)


def prompt_plan(**more: Any) -> StepPlan:
    one = {"sampling": [0], "temperatures": [0.0], "seeds": [1], "indices": [0]}
    tokens, pages = Writes([3], [0], [len(IDS)], IDS), Writes([3], [0], [len(PAGES)], PAGES)
    return StepPlan([3], [0], [len(IDS)], tokens=tokens, pages=pages, **(one | more))


def decode_plan(step: int) -> StepPlan:
    """Return a plan for one more token, which only the executor knows."""
    at = len(IDS) + step
    one: dict[str, Any] = {"sampling": [0], "temperatures": [0.0], "seeds": [1], "indices": [step + 1]}
    return StepPlan([3], [at], [at + 1], decodes=True, logprobs={0: 3}, **one)


def test_plans_made_by_hand_give_the_tokens_and_logprobs_of_transformers(executor: Executor, theirs: Any) -> None:
    wanted = InputLogprobs(0, 0, len(IDS) - 1, 2)
    first = executor.launch(as_bytes(prompt_plan(logprobs={0: 3}, input_logprobs=[wanted]))).result()[0]
    steps = [first, *(executor.launch(as_bytes(decode_plan(i))).result()[0] for i in range(6))]
    with torch.inference_mode():
        output = list(IDS)
        for _ in steps:
            output.append(theirs(torch.tensor([output])).logits[0, -1].argmax().item())
        expected = theirs(torch.tensor([output])).logits[0].log_softmax(-1)
    assert [token for step in steps for token in step.tokens] == output[len(IDS) :]
    for i, step in enumerate(steps):
        best = expected[len(IDS) - 1 + i].topk(3)
        assert [token for _, token in step.top_logprobs[0]] == best.indices.tolist()
        assert [logprob for logprob, _ in step.top_logprobs[0]] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert [token for _, token in first.input_logprobs] == IDS[1:]
    own = [expected[at, token].item() for at, token in enumerate(IDS[1:])]
    assert [logprob for logprob, _ in first.input_logprobs] == pytest.approx(own, abs=1e-4)


def through_bytes(engine: Harness, seen: list[StepPlan]) -> Callable[[StepPlan], Launched]:
    launch = engine.executor.launch

    def launching(plan: StepPlan) -> Launched:
        seen.append(plan)
        assert as_bytes(plan) == plan
        return launch(as_bytes(plan))

    return launching


@pytest.mark.parametrize("depth", [0, 1])
def test_a_scheduler_whose_plans_are_sent_as_bytes_answers_the_same(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    beginning = prompt(1, 40)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 1.2, "top_p": 0.8, "logit_bias": {3: 4.0}, "bad_words": ((5, 6),), "min_new_tokens": 3},
        {"return_logprob": True, "logprob_start_len": 4, "top_logprobs_num": 2, "frequency_penalty": 0.5},
        {"return_hidden_states": True, "seed": 1, "temperature": 0.7},
    ]
    answers, seen = [], list[StepPlan]()
    for sent in (False, True):
        engine = Harness(tiny, overlap_depth=depth, chunked_prefill_size=32, mixed_chunk=True)
        if sent:
            monkeypatch.setattr(engine.executor, "launch", through_bytes(engine, seen))
        for i, options in enumerate(asked):
            engine.submit(str(i), beginning[: 10 * i] + prompt(20 + i, 9), max_new_tokens=9, **{"seed": i, **options})
        engine.run()
        answers.append(engine.outs)
    assert answers[0] == answers[1]
    assert any(plan.rows_sampling for plan in seen)
    assert {plan.decodes for plan in seen} == {True, False}


# ---- micro-batches ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=60), st.integers(1, 8))
def test_micro_batches_are_all_sequences_in_order_and_about_equal(lengths: list[int], stages: int) -> None:
    step = StepPlan(list(range(len(lengths))), [0] * len(lengths), lengths)
    parts = step.micro_batches(stages)
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(len(lengths)))
    assert all(begin < end for begin, end in parts)
    count = max(1, min(stages, sum(lengths) // MICRO_BATCH_TOKENS))
    assert len(parts) <= count
    for begin, end in parts:  # each end is off by half a sequence at most
        assert sum(lengths[begin:end]) <= sum(lengths) / count + max(lengths)


def test_a_small_step_and_one_sequence_are_not_cut() -> None:
    assert StepPlan([0, 1], [0, 0], [255, 256]).micro_batches(2) == [(0, 2)]
    assert StepPlan([0, 1], [0, 0], [256, 256]).micro_batches(2) == [(0, 1), (1, 2)]
    assert StepPlan([0], [0], [4096]).micro_batches(4) == [(0, 1)]
