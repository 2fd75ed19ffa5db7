"""Pages that another runtime is still computing: they come piece by piece, and answers are those of computing."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.pulling_engine import engine, fake_peer, report, served
from support.runtime_engine import Harness, prompt
from support.runtime_server import eventually
from treeline_runtime.core import MOST_WITHIN_S, Remote
from treeline_runtime.kvcache import remote
from treeline_runtime.messages import FlushReq
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.lending import LATE_S
from treeline_runtime.scheduler.tiers import MOST_QUESTIONS, STALLED_S
from treeline_wire.events import block_hash, root_digest
from treeline_wire.pages import HaveRequest, Held, Later, Pages, encode_answer

PROMPT = [*prompt(0, 200), 1]
CHUNK = 40
MOST_LOOKS = 20_000


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[int]:
    return Harness(tiny).generate("alone", PROMPT)


def ended(engine: Harness, rid: str) -> bool:
    engine.step()
    return bool(engine.outs.get(rid)) and engine.last(rid).finish is not None


def answer(engine: Harness) -> None:
    """Let an engine answer its peers, and compute nothing."""
    assert engine.cache.tiers is not None
    engine.cache.tiers.take()


def test_pages_travel_while_the_prompt_is_computed(tiny: Path, context: zmq.Context[Any], expected: list[int]) -> None:
    with engine(tiny, context, chunked_prefill_size=CHUNK) as there, engine(tiny, context) as here:
        with served(there, context) as address:
            here.submit("here", PROMPT, pages_from=f"{address};within=30")
            here.submit("other", prompt(5, 40))
            eventually(lambda: ended(here, "other"))
            assert "here" in here.prefill.waiting, "nobody else waits"
            assert here.load().waiting_uncached_tokens < 4, "it is another engine's work"
            there.submit("there", PROMPT, max_new_tokens=1)
            while there.step() and there.prefill.chunked is not None:
                computed = there.prefill.chunked.tree_len

                def came(computed: int = computed) -> bool:
                    here.step()
                    answer(there)
                    return report(here).total_loaded_tokens["PEER"] == computed

                eventually(came)
                assert here.cache.tiers is not None
                held = here.cache.tiers.loads.held_pages
                assert (held, here.decode.running) == (0, {}) or computed == 200, "it holds nothing while it waits"
            assert computed == 200, "all of it came before the prompt's end"
            eventually(lambda: (there.step(), ended(here, "here"))[1])
        assert here.tokens("here") == expected
        assert here.last("here").cached_tokens == 200
        assert report(here).total_loads == {"loaded": 1, "computed": 0, "failed": 0}
        here.run()
        there.run()


def test_pages_leave_while_the_next_step_is_computed(
    tiny: Path, context: zmq.Context[Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny, context, chunked_prefill_size=CHUNK) as there, engine(tiny, context) as here:
        with served(there, context) as address:
            here.submit("here", PROMPT, pages_from=f"{address};within=30")
            there.submit("there", PROMPT, max_new_tokens=1)
            while there.prefill.chunked is None or not there.prefill.chunked.tree_len:
                there.step()
            computed, looks, came = there.prefill.chunked.tree_len, count(), list[int]()

            def is_done(_: Launched) -> bool:
                """The step takes as long as the pages of the one before."""
                here.step()
                came.append(report(here).total_loaded_tokens["PEER"])
                return came[-1] >= computed or next(looks) == MOST_LOOKS

            monkeypatch.setattr(Launched, "is_done", property(is_done))
            there.step()
            monkeypatch.undo()
            assert came[-1] == computed
            eventually(lambda: (there.step(), ended(here, "here"))[1])
        assert here.tokens("here") == expected
        here.run()
        there.run()


@pytest.mark.parametrize("says", [Held(0), Later()], ids=str)
def test_who_waits_in_vain_computes_and_avoids_nobody(
    tiny: Path, context: zmq.Context[Any], expected: list[int], says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.01)
    now, asked = [0.0], list[HaveRequest]()
    with engine(tiny, context, clock=lambda: now[0]) as here:

        def says_nothing(request: Any) -> Any:
            asked.append(request)
            return encode_answer(says)

        with fake_peer(context, says_nothing) as address:
            here.submit("here", PROMPT, pages_from=f"{address};within=2.5")
            eventually(lambda: (here.step(), len(asked) > (says != Later()))[1])
            now[0] = 2.4
            here.step()
            assert "here" in here.prefill.waiting
            now[0] = 2.5
            eventually(lambda: ended(here, "here"))
        assert here.tokens("here") == expected
        assert {type(one) for one in asked} == {HaveRequest}
        assert all(one.coming for one in asked)
        assert here.cache.tiers is not None
        assert here.cache.tiers.store.remote is not None
        assert here.cache.tiers.store.remote.may_ask(address)
        here.run()


def test_a_new_page_renews_the_patience_and_one_that_is_lost_ends_it(
    tiny: Path, context: zmq.Context[Any], expected: list[int]
) -> None:
    now = [0.0]
    with (
        engine(tiny, context, chunked_prefill_size=CHUNK) as there,
        served(there, context) as address,
        engine(tiny, context, clock=lambda: now[0]) as here,
    ):
        here.submit("here", PROMPT, pages_from=f"{address};within=2")
        there.submit("there", PROMPT, max_new_tokens=1)
        for chunk in range(1, 4):
            there.step()
            eventually(
                lambda chunk=chunk: (
                    here.step(),
                    answer(there),
                    report(here).total_loaded_tokens["PEER"] == chunk * CHUNK,
                )[2]
            )
            now[0] += 1.9
        there.abort("there")
        eventually(lambda: (there.step(), there.is_idle)[1])
        here.step()
        assert "here" in here.prefill.waiting
        now[0] += 2
        eventually(lambda: (answer(there), ended(here, "here"))[1])
        assert here.tokens("here") == expected
        assert here.last("here").cached_tokens == 3 * CHUNK
        here.run()


def test_pages_that_travel_longer_than_the_patience_for_the_next_do_not_end_it(
    tiny: Path, context: zmq.Context[Any]
) -> None:
    now, asked = [0.0], list[HaveRequest]()
    with engine(tiny, context, clock=lambda: now[0]) as here:
        assert here.cache.tiers is not None
        form = here.cache.tiers.store.form

        def has_few(request: Any) -> Any:
            if isinstance(request, HaveRequest):
                asked.append(request)
                return encode_answer(Held(2) if len(asked) == 1 else Later())
            now[0] += 3
            sums = [form.checksum(digest, memoryview(bytes(form.nbytes))) for digest in request.digests]
            return encode_answer(Pages(request.number, sums), bytes(form.nbytes * len(sums)))

        with fake_peer(context, has_few) as peer:
            here.submit("here", PROMPT, pages_from=f"{peer};within=2")
            eventually(lambda: (here.step(), len(asked) == 2 or "here" not in here.prefill.waiting)[1])
            assert len(asked) == 2
            here.abort()
            here.run()


def test_of_a_client_that_leaves_nothing_is_left(tiny: Path, context: zmq.Context[Any]) -> None:
    asked = list[Any]()

    def lives(request: Any) -> Any:
        asked.append(request)
        return encode_answer(Later())

    with engine(tiny, context) as here, fake_peer(context, lives) as peer:
        for i in range(3 * MOST_QUESTIONS):
            here.submit(str(i), [i, *PROMPT], pages_from=f"{peer};within=50")
        eventually(lambda: (here.step(), len(asked) == MOST_QUESTIONS)[1])
        here.abort()
        here.run()
        assert here.cache.tiers is not None
        assert (here.cache.tiers._questions, here.cache.tiers._in_line) == ({}, {})
        assert len(asked) == MOST_QUESTIONS, "those in line were not asked"


def test_many_who_wait_for_one_peer_take_turns_and_delay_nobody(
    tiny: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than it is asked about at once, and more than a step passes over."""
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.01)
    now = [0.0]
    with (
        engine(tiny, context, clock=lambda: now[0]) as there,
        served(there, context) as address,
        engine(tiny, context, clock=lambda: now[0]) as here,
    ):
        for i in range(150):
            here.submit(f"waits-{i}", [i % 90, i // 90, *PROMPT], pages_from=f"{address};within=50")
        here.submit("other", prompt(5, 40))
        eventually(lambda: ended(here, "other"))
        assert len(here.prefill.waiting) == 150
        there.submit("last", [149 % 90, 1, *PROMPT], max_new_tokens=1)

        def has_its_turn() -> bool:
            now[0] += LATE_S / 2  # each question waits so long in vain; nobody's patience ends
            there.step()
            return ended(here, "waits-149")

        eventually(has_its_turn)
        assert here.last("waits-149").cached_tokens == 200
        here.abort()
        eventually(lambda: (there.step(), here.step(), here.is_idle)[2])
        here.run()


def test_those_in_line_for_a_peer_that_says_nothing_wait_no_longer_than_those_that_ask_it(
    tiny: Path, context: zmq.Context[Any]
) -> None:
    now, asked = [0.0], list[Any]()

    def lives(request: Any) -> Any:
        asked.append(request)
        return encode_answer(Later())

    with engine(tiny, context, clock=lambda: now[0]) as here, fake_peer(context, lives) as peer:
        for i in range(3 * MOST_QUESTIONS):
            here.submit(str(i), [i, *prompt(3, 60)], pages_from=f"{peer};within=50")
        eventually(lambda: (here.step(), len(asked) == MOST_QUESTIONS)[1])
        now[0] = 49.9
        here.step()
        assert len(here.prefill.waiting) == 3 * MOST_QUESTIONS
        now[0] = 50.0
        here.run()
        assert all(ended(here, str(i)) for i in range(3 * MOST_QUESTIONS))
        assert len(asked) == MOST_QUESTIONS


def test_clients_take_turns_to_ask_a_peer(
    tiny: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 60.0)
    asked, go, last = list[bytes](), threading.Event(), [90, *PROMPT]

    def has_none(request: Any) -> Any:
        asked.append(request.digests[0])
        return encode_answer(Held(0)) if go.wait(60) else None

    with engine(tiny, context) as here, fake_peer(context, has_none) as peer:
        for i in range(4 * MOST_QUESTIONS):
            here.submit(str(i), [i, *PROMPT], client="many", pages_from=f"{peer};within=50")
        here.step()
        here.submit("last", last, client="one", pages_from=f"{peer};within=50")
        here.step()
        go.set()
        first = block_hash(root_digest(None), last[: here.config.page_size])
        eventually(lambda: (here.step(), first in asked)[1])
        assert asked.index(first) <= 2 * MOST_QUESTIONS
        here.abort()
        here.run()


def test_a_flush_ends_what_nobody_waits_for_any_more(tiny: Path, context: zmq.Context[Any]) -> None:
    asked = threading.Event()

    def lives(request: Any) -> Any:
        if isinstance(request, HaveRequest):
            return encode_answer(Held(len(request.digests)))
        asked.set()
        return encode_answer(Later())

    with engine(tiny, context) as here, fake_peer(context, lives) as peer:
        here.submit("here", PROMPT, pages_from=f"{peer};within=50")
        eventually(lambda: (here.step(), asked.is_set())[1])
        here.abort()
        here.step()
        here.inbox.append(FlushReq("flush"))
        eventually(lambda: (here.step(), here.replies)[1])
        assert here.replies[-1].ok, here.replies


def test_a_peer_that_keeps_its_pages_delays_others_as_any_disk_and_holds_few_threads(
    tiny: Path, context: zmq.Context[Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 30.0)
    now, gets = [0.0], list[Any]()

    def keeps(request: Any) -> Any:
        if isinstance(request, HaveRequest):
            return encode_answer(Held(len(request.digests)))
        gets.append(request.digests[0])
        return encode_answer(Later())

    with engine(tiny, context, clock=lambda: now[0]) as here, fake_peer(context, keeps) as peer:
        prompts = [PROMPT, *([i, *prompt(i, 60)] for i in range(2 * MOST_QUESTIONS))]
        for i, tokens in enumerate(prompts):
            here.submit(str(i), tokens, pages_from=f"{peer};within=50")
        first = block_hash(root_digest(None), PROMPT[: here.config.page_size])
        assert here.cache.tiers is not None
        fetches = here.cache.tiers._fetches
        eventually(lambda: (here.step(), len(fetches) >= MOST_QUESTIONS and first in gets)[1])
        here.submit("other", PROMPT)
        for _ in range(3):
            here.step()
        assert "other" in here.prefill.waiting, "the pages may come"
        now[0] = STALLED_S
        eventually(lambda: ended(here, "other"))
        assert here.tokens("other") == expected
        assert len(here.prefill.waiting) == len(prompts)
        assert len(fetches) == MOST_QUESTIONS
        here.abort()
        here.run()


def test_the_header_is_read_as_it_is_written_and_nothing_else() -> None:
    assert Remote.of("10.0.0.1:5") == Remote("10.0.0.1:5")
    assert Remote.of("[::1]:5;within=2.5") == Remote("[::1]:5", 2.5)
    assert Remote.of("a:5;within=999999") == Remote("a:5", MOST_WITHIN_S)
    for bad in ("", ";within=1", "a:1;", "a:1;within=", "a:1;within=-1", "a:1;within=1e3", "a:1;within=nan"):
        assert Remote.of(bad) is None, bad
    for bad in ("a:1;within=1;within=2", "a:1; within=1", "a:1;within=1\n", "a:1;within=٣", "a:1;x=1"):
        assert Remote.of(bad) is None, bad
