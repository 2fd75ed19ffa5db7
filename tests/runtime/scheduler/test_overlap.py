"""Results come one step behind: pages of a launched batch stay held, whenever a request ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.messages import StopReq

pytestmark = pytest.mark.deep

REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "short": (prompt(1, 6), {"max_new_tokens": 3}),
    "long": (prompt(2, 43), {"max_new_tokens": 7}),
    "same": (prompt(2, 43)[:36] + prompt(3, 4), {"max_new_tokens": 5}),
    "score": (prompt(4, 9), {"max_new_tokens": 0}),
    "free": (prompt(5, 12), {"max_new_tokens": 9, "temperature": 0.8, "seed": 3}),
}
SETTINGS: dict[str, Any] = {
    "chunked_prefill_size": 16,
    "max_running_requests": 3,
    "max_total_tokens": 160,
    "overlap_depth": 1,
}


def start(tiny: Path, **changes: Any) -> Harness:
    engine = Harness(tiny, **(SETTINGS | changes))
    for rid, (ids, options) in REQUESTS.items():
        engine.submit(rid, ids, **options)
    return engine


@pytest.fixture(scope="module")
def calm(tiny: Path) -> dict[str, list[int]]:
    engine = start(tiny, overlap_depth=0)
    engine.run()
    return {rid: engine.tokens(rid) for rid in REQUESTS}


def test_results_come_one_step_behind(tiny: Path) -> None:
    engine = Harness(tiny, overlap_depth=1)
    engine.submit("a", prompt(1, 6), max_new_tokens=4)
    assert engine.step()
    assert len(engine._pending) == 1
    assert "a" not in engine.outs
    engine.step()
    assert len(engine.tokens("a")) == 1
    assert engine.decode.running["a"].in_flight == 1
    assert engine.decode.running["a"].launched_tokens == 2
    engine.run()


def steps_of(tiny: Path) -> int:
    engine = start(tiny)
    engine.run()
    return engine.steps


@pytest.mark.parametrize(
    ("victim", "how"), [*((victim, "abort") for victim in REQUESTS), ("long", "stop"), ("long", "abort_all")]
)
def test_a_request_may_end_at_every_point(tiny: Path, calm: dict[str, list[int]], victim: str, how: str) -> None:
    """The harness asserts after every step that the accounts balance and that no page in flight is free."""
    for point in range(steps_of(tiny)):
        engine = start(tiny)
        for _ in range(point):
            engine.step()
        if how == "abort":
            engine.abort(victim)
        elif how == "stop":
            engine.inbox.append(StopReq(victim, "x"))
        else:
            engine.abort()
        engine.run()
        for rid, tokens in calm.items():
            found = engine.tokens(rid)
            if rid == victim or how == "abort_all":
                assert found == tokens[: len(found)], f"{rid} at step {point}"
            else:
                assert found == tokens, f"{rid} at step {point}"


def test_pages_are_held_until_the_launched_batch_is_processed(tiny: Path) -> None:
    engine = Harness(tiny, overlap_depth=1)
    engine.submit("a", prompt(1, 30), max_new_tokens=50)
    engine.submit("b", prompt(2, 30), max_new_tokens=50)
    for _ in range(6):
        engine.step()
    req = engine.decode.running["a"]
    pages = engine.table.pages[req.row, : req.num_pages].copy()
    assert req.in_flight == 1
    # the abort itself, before the loop goes on: the terminal message is queued, nothing is released
    engine.abort("a")
    for message in engine._transport.receive():
        engine._handle(message)
    assert req.finish is not None
    assert req.in_flight == 1
    assert req.row >= 0
    assert not engine.cache.pool._is_free[pages].any()
    engine.check_integrity()
    engine.step()
    assert req.in_flight == 0
    assert req.row == -1
    engine.run()


def test_duplicates_found_while_in_flight_are_freed_later(tiny: Path) -> None:
    """Equal prompts too short to wait for each other are computed twice; the second finds pages in the tree already."""
    engine = Harness(tiny, overlap_depth=1, chunked_prefill_size=64)
    same = prompt(1, 24)
    engine.submit("a", same, max_new_tokens=6)
    engine.submit("b", same, max_new_tokens=6)
    engine.step()
    assert [req.tree_len for req in engine.decode.running.values()] == [0, 0]
    engine.step()
    second = engine.decode.running["b"]
    assert second.tree_len == 24
    assert sum(len(pages) for _, pages in second.deferred) == 6, "its own copies wait for the launched decode step"
    engine.step()
    assert not second.deferred, "and no longer"
    engine.run()
    assert engine.tokens("a") == engine.tokens("b")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_waits_for_a_prefix_that_is_being_computed(tiny: Path, depth: int) -> None:
    beginning = prompt(1, 48)
    engine = Harness(tiny, overlap_depth=depth, prefills_in_a_row=5)
    engine.submit("computes", beginning + prompt(2, 4))
    engine.step()
    engine.submit("waits", beginning + prompt(3, 4))
    engine.submit("has nothing to wait for", prompt(4, 40))
    engine.run()
    assert [engine.last(rid).cached_tokens for rid in ("computes", "waits", "has nothing to wait for")] == [0, 48, 0]
    assert engine.tokens("waits") == Harness(tiny).generate("alone", beginning + prompt(3, 4))
