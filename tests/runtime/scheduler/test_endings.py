"""Every accepted request ends in exactly one terminal message, and a fault stays with the request that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import VOCAB, Harness, prompt
from treeline_runtime.messages import (
    AbortReq,
    DrainReq,
    FinishReason,
    FlushReq,
    GenerateReq,
    HeardReq,
    Reply,
    SamplingParams,
    StateReq,
    StopReq,
)
from treeline_runtime.scheduler.launched import Launched


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 512, {}, "the prompt has 512 tokens; at most 511 fit"),
        ([1, VOCAB], {}, "outside the vocabulary of 96"),
        ([1, -1], {}, "outside the vocabulary"),
        ([1, 2], {"temperature": -1.0}, "temperature is out of range"),
        ([1, 2], {"logprob_start_len": 3}, "logprob_start_len 3"),
        ([1, 2], {"logprob_start_len": -2}, "logprob_start_len -2"),
        ([1, 2], {"top_logprobs_num": -1}, "top_logprobs_num"),
        ([1, 2], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_an_impossible_request_is_refused_at_once(tiny: Path, ids: list[int], options: Any, message: str) -> None:
    engine = Harness(tiny)
    engine.submit("bad", ids, **options)
    engine.step()
    reason = engine.finish("bad")
    assert (reason.type, reason.status) == ("error", 400)
    assert message in str(reason.message)
    engine.run()


def test_a_full_queue_refuses_with_503(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=2, max_queued_requests=3)
    for i in range(8):
        engine.submit(str(i), prompt(i, 8))
    engine.run()
    statuses = [engine.finish(str(i)).status for i in range(8)]
    assert statuses == [None] * 5 + [503] * 3, "two run, three wait"
    assert "the queue is full: 3" in str(engine.finish("7").message)


def test_a_rid_in_use_is_refused(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.submit("a", prompt(1, 8))
    engine.submit("a", prompt(2, 8))
    engine.run()
    assert engine.tokens("a") == Harness(tiny).generate("x", prompt(1, 8))


def test_abort_is_legal_in_every_state_and_idempotent(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=2, chunked_prefill_size=8)
    engine.abort("unknown")
    engine.submit("running", prompt(1, 6), max_new_tokens=50)
    engine.step()
    engine.submit("chunked", prompt(2, 40))
    engine.submit("waiting", prompt(3, 8))
    engine.step()  # decodes
    engine.step()
    assert "running" in engine.decode.running
    assert engine.prefill.chunked is not None
    assert "waiting" in engine.prefill.waiting
    for rid in ("waiting", "chunked", "running", "running"):
        engine.abort(rid)
        engine.step()
        assert engine.finish(rid).type == "abort"
        engine.abort(rid)
    engine.run()
    assert engine.cache.tree.num_pages > 0, "what was computed stays cached"


def test_a_client_that_leaves_frees_its_pages_within_one_step(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.submit("a", prompt(1, 30), max_new_tokens=100)
    for _ in range(5):
        engine.step()
    assert engine.load().pages_used > 0
    engine.abort("a")
    engine.step()
    assert engine.load().pages_used == 0


def test_a_stop_string_ends_a_request_once(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.submit("a", prompt(1, 9), max_new_tokens=50)
    for _ in range(4):
        engine.step()
    engine.inbox += [StopReq("a", "END"), StopReq("a", "END"), StopReq("never", "x")]
    engine.run()
    assert engine.finish("a") == FinishReason("stop", matched="END")
    assert len(engine.tokens("a")) < 10


def test_flush_works_when_idle_and_is_refused_when_busy(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.submit("a", prompt(1, 20))
    engine.inbox.append(FlushReq("one"))
    engine.run()
    engine.inbox.append(FlushReq("two"))
    engine.run()
    first, second = engine.replies
    assert (first.id, first.ok) == ("one", False)
    assert "running or waiting" in str(first.message)
    assert (second.id, second.ok) == ("two", True)
    assert engine.cache.pool.num_free == engine.cache.pool.num_pages
    assert engine.generate("b", prompt(1, 20)) == engine.tokens("a")
    assert engine.last("b").cached_tokens == 0


def test_the_state_can_be_requested(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.generate("a", prompt(1, 20))
    engine.inbox += [StateReq("r", "radix"), StateReq("l", "load")]
    engine.step()
    engine.inbox += [DrainReq(), StateReq("m", "load")]
    engine.run()
    radix, load, drained = (reply.data for reply in engine.replies)
    assert radix is not None
    assert load is not None
    assert drained is not None
    limits = engine.limits.as_dict()
    assert limits["max_total_tokens"] == 1024
    assert limits["longest_request"] == limits["context_length"] == 512
    assert limits["dtype"] == "float32"
    blocks = radix["blocks"]
    assert len(blocks) == (20 + 7) // 4
    assert blocks[0]["parent"] is None
    assert [b["parent"] for b in blocks[1:]] == [b["hash"] for b in blocks[:-1]]
    assert blocks[0]["tokens"] == prompt(1, 20)[:4]
    assert load["running"] == 0
    assert (load["draining"], drained["draining"]) == (False, True)


# ---- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_breaks_its_batch_fails_alone(tiny: Path, depth: int) -> None:
    engine = Harness(tiny, overlap_depth=depth)
    engine.fail_launches_of("bad")
    for rid in ("a", "bad", "b"):
        engine.submit(rid, prompt(len(rid), 10))
    engine.run()
    assert engine.finish("bad").status == 500
    assert "bad luck" in str(engine.finish("bad").message)
    assert engine.tokens("a") == engine.tokens("b") == Harness(tiny).generate("x", prompt(1, 10))


def test_a_model_that_computes_nan_is_an_error_not_a_text(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(tiny)
    engine.spoil_logits(monkeypatch, slice(1))
    engine.submit("a", prompt(1, 10))
    engine.submit("b", prompt(2, 10))
    engine.step()
    assert engine.finish("a").message == "the model computed NaN or infinity"
    assert engine.last("b").finish is None
    monkeypatch.undo()
    engine.run()


def test_a_result_that_cannot_be_read_fails_the_batch_and_the_scheduler_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(tiny)
    monkeypatch.setattr(Launched, "result", lambda self: (_ for _ in ()).throw(RuntimeError("device lost")))
    engine.submit("a", prompt(1, 10))
    engine.step()
    assert engine.finish("a").status == 500
    monkeypatch.undo()
    assert engine.generate("b", prompt(1, 10)) == Harness(tiny).generate("x", prompt(1, 10))


def test_a_result_that_cannot_be_taken_fails_its_request(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(tiny)
    keep = engine.cache.cache_unfinished

    def broken(req: Any) -> None:
        if req.rid == "bad":
            raise RuntimeError("no")
        keep(req)

    monkeypatch.setattr(engine.cache, "cache_unfinished", broken)
    engine.submit("bad", prompt(1, 10))
    engine.submit("good", prompt(2, 10))
    engine.run()
    assert engine.finish("bad").status == 500
    assert engine.finish("good") == FinishReason("length")


def test_a_message_that_breaks_the_scheduler_is_answered(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(tiny)
    monkeypatch.setattr(engine.prefill, "queue", lambda req: 1 / 0)
    engine.inbox += [GenerateReq("a", [1, 2], SamplingParams()), AbortReq("a")]
    engine.run()
    assert engine.finish("a").status == 500


def test_one_message_aborts_several_requests_and_receipt_is_confirmed(tiny: Path) -> None:
    engine = Harness(tiny)
    for rid in "abc":
        engine.submit(rid, prompt(1, 10), max_new_tokens=50)
    engine.inbox.append(HeardReq("after c"))
    engine.step()
    assert engine.replies == [Reply("after c")]
    engine.inbox.append(AbortReq(["a", "c", "nobody's"]))
    engine.run()
    assert [engine.finish(rid).type for rid in "abc"] == ["abort", "length", "abort"]


def test_the_reported_tree_equals_the_published_one(tiny: Path) -> None:
    """An abort in the same step as the question changes the tree first."""
    engine = Harness(tiny)
    engine.submit("a", prompt(1, 21), max_new_tokens=50)
    for _ in range(8):
        engine.step()
    engine.inbox += [StateReq("r", "radix"), AbortReq("a")]
    engine.step()
    data = engine.replies[-1].data
    assert data is not None
    published = [h for update in engine.updates for e in update.events for h in getattr(e, "block_hashes", ())]
    assert {int(block["hash"]) for block in data["blocks"]} == set(published)
    assert len(published) == (21 + 7) // 4
