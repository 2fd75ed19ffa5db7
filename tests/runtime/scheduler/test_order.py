"""The order of prefills: policies, shared prefixes, chunks, decode protection."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runtime_engine import Harness, Recorder, prompt
from treeline_runtime.kvcache import TOKEN_BYTES, Place, key_of

# ---- policies -------------------------------------------------------------------------------------------


def test_fcfs_keeps_the_order_of_arrival(tiny: Path) -> None:
    engine = Recorder(tiny, max_running_requests=1)
    for i in range(4):
        engine.submit(str(i), prompt(i, 8), max_new_tokens=2)
    engine.run()
    assert engine.prefills == [["0"], ["1"], ["2"], ["3"]]


def test_lpm_prefers_cached_prompts(tiny: Path) -> None:
    engine = Recorder(tiny, max_running_requests=1, schedule_policy="lpm")
    engine.generate("warm", prompt(9, 40), max_new_tokens=2)
    engine.submit("cold", prompt(1, 20), max_new_tokens=2)
    engine.submit("warmer", prompt(9, 40)[:20] + prompt(2, 20), max_new_tokens=2)
    engine.submit("warmest", prompt(9, 40) + prompt(3, 8), max_new_tokens=2)
    engine.run()
    assert engine.prefills[1:] == [["warmest"], ["warmer"], ["cold"]]


# ---- shared prefixes ------------------------------------------------------------------------------------


def on_their_way(engine: Harness) -> int:
    """Return how many pages are on their way."""
    nodes = [node for node, _ in engine.cache.tree._walk() if node.place is Place.ON_ITS_WAY]
    return sum(len(node.key) // (TOKEN_BYTES * engine.config.page_size) for node in nodes)


def test_the_others_wait_for_all_chunks_of_a_shared_prefix(tiny: Path) -> None:
    engine = Recorder(tiny, chunked_prefill_size=16)
    shared = prompt(1, 100)
    for i in range(3):
        engine.submit(str(i), shared + prompt(10 + i, 5), max_new_tokens=3)
    engine.run()
    assert [engine.last(str(i)).cached_tokens for i in range(3)] == [0, 96, 100], "4 more are not worth waiting for"


@pytest.mark.parametrize(("page_size", "waits"), [(1, True), (16, True), (64, False)])
def test_a_request_does_not_wait_for_less_than_a_page(tiny: Path, page_size: int, waits: bool) -> None:
    """The 40 common tokens are less than a page of 64: the cache would hold none of them."""
    engine = Recorder(tiny, page_size=page_size)
    for i in range(3):
        engine.submit(str(i), prompt(1, 40) + prompt(10 + i, 8), max_new_tokens=1)
    engine.run()
    assert engine.prefills == ([["0"], ["1", "2"]] if waits else [["0", "1", "2"]])


@pytest.mark.parametrize("how", ["aborted", "failed"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_waits_for_a_dying_one_computes_the_prefix_itself(tiny: Path, depth: int, how: str) -> None:
    """It begins as soon as the death is known, and finds the prefix that was cached before."""
    beginning = prompt(1, 48)
    engine = Harness(tiny, overlap_depth=depth, chunked_prefill_size=16)
    engine.submit("dies", beginning + prompt(2, 4))
    engine.submit("waits", beginning + prompt(3, 4))
    engine.step()
    dying = engine.prefill.chunked
    assert dying is not None
    assert on_their_way(engine) == (13 if depth else 9)
    assert "waits" in engine.prefill.waiting
    if how == "aborted":
        engine.abort("dies")
    else:
        engine._fail(dying, "a fault")
    engine.run()
    assert on_their_way(engine) == 0
    assert engine.last("waits").cached_tokens == (0 if depth else 16)
    assert engine.tokens("waits") == Harness(tiny).generate("alone", beginning + prompt(3, 4))


def test_a_request_waits_for_the_filler_of_its_pages(tiny: Path) -> None:
    engine = Harness(tiny)
    ids = prompt(1, 60)
    filler = engine.cache.tree.begin_filling(None, key_of(ids))
    engine.submit("waits", ids)
    engine.submit("other", prompt(2, 60))
    while engine.step():
        pass
    assert engine.last("other").finish is not None
    assert list(engine.prefill.waiting) == ["waits"]
    assert not engine.is_idle
    engine.cache.tree.unlock(filler)
    engine.run()
    assert engine.tokens("waits") == Harness(tiny).generate("alone", ids)


def test_a_chunk_is_cached_before_the_prompt_is_done(tiny: Path) -> None:
    engine = Harness(tiny, chunked_prefill_size=16)
    engine.submit("a", prompt(1, 60))
    engine.step()
    assert engine.cache.tree.num_pages == 4
    assert len(engine.updates) == 1
    engine.step()
    assert engine.cache.tree.num_pages == 8
    engine.run()


# ---- prefill and decode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_decoding_goes_on_while_prompts_are_computed(tiny: Path, in_a_row: int) -> None:
    engine = Recorder(tiny, chunked_prefill_size=8, prefills_in_a_row=in_a_row)
    engine.submit("first", prompt(1, 8), max_new_tokens=100)
    engine.step()
    for i in range(4):
        engine.submit(str(i), prompt(10 + i, 40), max_new_tokens=2)
    engine.run()
    stalled = longest = 0
    for prefilled, _, _ in engine.batches:
        stalled = stalled + 1 if prefilled else 0
        longest = max(longest, stalled)
    assert longest == in_a_row


def test_a_step_never_computes_more_than_the_chunk(tiny: Path) -> None:
    engine = Recorder(tiny, chunked_prefill_size=20)
    for i in range(5):
        engine.submit(str(i), prompt(i, 7 + 9 * i), max_new_tokens=2)
    engine.run()
    sizes = [tokens for prefilled, _, tokens in engine.batches if prefilled]
    assert max(sizes) <= 20
    assert sum(sizes) == sum(7 + 9 * i for i in range(5))


def test_a_chunk_smaller_than_a_page_is_a_page(tiny: Path) -> None:
    engine = Harness(tiny, page_size=16, chunked_prefill_size=3)
    assert engine.limits.chunked_prefill_size == 16
    engine.generate("a", prompt(1, 50))


def test_rows_keep_the_order_of_admission(tiny: Path) -> None:
    engine = Recorder(tiny)
    names = ["z", "a", "m", "b"]
    for i, name in enumerate(names):
        engine.submit(name, prompt(i, 6), max_new_tokens=5)
    engine.run()
    assert [decoding for _, decoding, _ in engine.batches if decoding] == [names] * 4
