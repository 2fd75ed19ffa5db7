"""Mixed batches: running requests decode in the steps that compute prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, Recorder, prompt
from treeline_runtime.core import Batch
from treeline_runtime.messages import FinishReason

pytestmark = pytest.mark.deep

REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "scored": (prompt(1, 6), {"max_new_tokens": 14, "return_logprob": True, "top_logprobs_num": 2}),
    "penalised": (prompt(2, 9), {"max_new_tokens": 14, "frequency_penalty": 1.5, "repetition_penalty": 1.3}),
    "seeded": (prompt(3, 12), {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.8, "seed": 5}),
    "long": (prompt(4, 75), {"max_new_tokens": 5, "return_logprob": True, "logprob_start_len": 0}),
    "same": (prompt(4, 75)[:60] + prompt(5, 9), {"max_new_tokens": 6}),
    "prefill only": (prompt(6, 20), {"max_new_tokens": 0, "return_logprob": True, "logprob_start_len": 0}),
}
MIXED: dict[str, Any] = {"mixed_chunk": True, "chunked_prefill_size": 16}


class Waiting(Recorder):
    """Counts the steps that decodes had to wait for."""

    wait = longest_wait = 0

    def _launch(self, batch: Batch) -> None:
        runnable = self.decode.runnable()
        super()._launch(batch)
        self.wait = self.wait + 1 if runnable and not self.batches[-1][1] else 0
        self.longest_wait = max(self.longest_wait, self.wait)


def start(tiny: Path, kind: type[Harness] = Harness, **changes: Any) -> Harness:
    engine = kind(tiny, **(MIXED | {"max_total_tokens": 400} | changes))
    for rid, (ids, options) in REQUESTS.items():
        engine.submit(rid, ids, **options)
        engine.step()
    return engine


def said(engine: Harness, rid: str) -> tuple[list[int], list[int], list[int | None]]:
    """Return the tokens, the tokens of their logprobs, and the tokens of the prompt's logprobs."""
    scored = [pair for out in engine.outs[rid] for pair in out.input_token_logprobs or ()]
    return engine.tokens(rid), [t for _, t in engine.logprobs(rid)], [t for _, t in scored]


@pytest.fixture(scope="module")
def calm(tiny: Path) -> Harness:
    engine = start(tiny, mixed_chunk=False, max_total_tokens=2048, chunked_prefill_size=256)
    engine.run()
    return engine


def test_running_requests_decode_in_every_step_of_a_long_prompt(tiny: Path) -> None:
    engine = Recorder(tiny, **MIXED)
    engine.submit("a", prompt(1, 8), max_new_tokens=20)
    engine.submit("b", prompt(2, 8), max_new_tokens=20)
    engine.step()
    engine.submit("long", prompt(3, 100), max_new_tokens=3)
    engine.run()
    first, *others = engine.batches
    assert first == (["a", "b"], [], 16)
    chunks = [batch for batch in others if batch[0]]
    assert others[: len(chunks)] == chunks
    assert all(batch[:2] == (["long"], ["a", "b"]) for batch in chunks)
    assert all(tokens <= 16 for *_, tokens in chunks)
    assert len(chunks) == -(-100 // 12), "two tokens of 16 are taken, and a chunk is whole pages"
    assert engine.stats.total_prefill_tokens == 116
    assert len(engine.outs["a"]) == 20


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_and_logprobs_are_those_of_separate_steps(tiny: Path, calm: Harness, depth: int) -> None:
    engine = start(tiny, Recorder, overlap_depth=depth)
    engine.run()
    assert sum(bool(prefilled and riding) for prefilled, riding, _ in engine.batches) > 5  # type: ignore[attr-defined]
    for rid in REQUESTS:
        assert said(engine, rid) == said(calm, rid), rid
    mine, others = engine.logprobs("scored"), calm.logprobs("scored")
    assert [p for p, _ in mine] == pytest.approx([p for p, _ in others], abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("victim", ["scored", "long", "same"])
def test_a_mixed_batch_survives_an_abort_at_every_point(tiny: Path, calm: Harness, victim: str, depth: int) -> None:
    """The harness asserts after every step that the accounts balance and that no page in flight is free."""
    whole = start(tiny, overlap_depth=depth)
    begun = whole.steps
    whole.run()
    for point in range(0, whole.steps - begun, 2):
        engine = start(tiny, overlap_depth=depth)
        for _ in range(point):
            engine.step()
        engine.abort(victim)
        engine.run()
        for rid in REQUESTS:
            found, expected = engine.tokens(rid), calm.tokens(rid)
            assert found == (expected[: len(found)] if rid == victim else expected), f"{rid} at step {point}"


def test_many_running_requests_leave_a_page_of_the_budget(tiny: Path) -> None:
    """The chunk is 8 tokens and ten requests run, yet a prompt is computed."""
    engine = Recorder(tiny, mixed_chunk=True, chunked_prefill_size=8)
    for i in range(10):
        engine.submit(str(i), prompt(i, 4), max_new_tokens=100)
    while len(engine.decode.running) < 10:
        engine.step()
    engine.submit("late", prompt(99, 40), max_new_tokens=1)
    for _ in range(11):
        engine.step()
    assert engine.last("late").finish == FinishReason("length")
    engine.abort()
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("bad", ["long", "scored"])
def test_a_request_that_breaks_a_mixed_batch_fails_alone(tiny: Path, calm: Harness, bad: str, depth: int) -> None:
    engine = Harness(tiny, **MIXED, overlap_depth=depth)
    for rid in ("scored", "penalised"):
        engine.submit(rid, REQUESTS[rid][0], **REQUESTS[rid][1])
    for _ in range(3):
        engine.step()
    engine.fail_launches_of(bad)
    for rid in ("long", "same"):
        engine.submit(rid, REQUESTS[rid][0], **REQUESTS[rid][1])
    engine.run()
    finish = engine.finish(bad)
    assert finish.status == 500
    for rid in {"scored", "penalised", "long", "same"} - {bad}:
        assert said(engine, rid) == said(calm, rid), rid


@pytest.mark.parametrize("settings", [{}, {"overlap_depth": 1}, {"overlap_depth": 1, "mixed_chunk": True}])
@pytest.mark.parametrize("total", [152, 184, 208])
def test_decodes_wait_no_longer_where_memory_is_short(tiny: Path, settings: dict[str, Any], total: int) -> None:
    """A long prompt takes page after page while five requests need some: a turn that waits for results is not lost."""
    engine = Waiting(tiny, page_size=1, max_total_tokens=total, chunked_prefill_size=8, **settings)
    engine.ratio.value = engine.ratio.initial = engine.ratio.minimum = 0.0
    for i in range(5):
        engine.submit(str(i), prompt(i, 8), max_new_tokens=40)
    engine.step()
    engine.submit("long", prompt(9, 100), max_new_tokens=2)
    engine.run()
    assert engine.longest_wait == (0 if "mixed_chunk" in settings else 1)
