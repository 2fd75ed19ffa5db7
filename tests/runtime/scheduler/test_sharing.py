"""Decode attention shares exactly the pages that sequences have in common, whatever happened to their rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.attention import ATTENTION_BACKENDS, Layout
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.kvcache import KVPool
from treeline_runtime.models.model_config import Scoring

pytest.importorskip("triton")
BLOCK = 8


class Checked(TorchSDPA):
    """Makes the kernels' backend plan every decode step, and checks what its kernels would read."""

    def __init__(self, pool: KVPool, num_heads: int, scoring: Scoring) -> None:
        from treeline_runtime.attention.decode import Decode

        super().__init__(pool, num_heads, scoring)
        self.decode = Decode(self)
        self.decode._block = BLOCK
        self.sharing: list[list[tuple[list[int], int]]] = []
        """For each decode step: rows of the table, and how many tokens they read together."""
        self.wrong: list[Exception] = []

    def plan(self, layout: Layout, buffers: None = None) -> Any:
        if max(layout.q_lens) == 1:
            try:
                self.sharing.append(self._check(layout))
            except Exception as error:  # the scheduler would try each request alone
                self.wrong.append(error)
        return super().plan(layout)

    def _check(self, layout: Layout) -> list[tuple[list[int], int]]:
        step = self.decode.plan(layout).buffers
        row = step.segments[0].numpy()
        table, members = row[: step.shape.members_at].reshape(-1, 4), row[step.shape.members_at :]
        rows, pages = step.rows.tolist(), layout.page_table.numpy()
        read = [np.zeros(n, dtype=np.int64) for n in layout.kv_lens]
        found = []
        for (_, begin, end, place), (_, _, _, next_place) in pairwise(table):
            sequences = members[place:next_place].tolist()
            for sequence in sequences:
                read[sequence][begin * BLOCK : end] += 1
                where = slice(begin * BLOCK // self.pool.page_size, -(-end // self.pool.page_size))
                assert np.array_equal(pages[rows[sequence], where], pages[rows[sequences[0]], where])
            if len(sequences) > 1:
                found.append((sorted(rows[sequence] for sequence in sequences), int(end)))
        assert all((counts == 1).all() for counts in read)
        return found


AnEngine = Callable[..., tuple[Harness, Checked]]


@pytest.fixture
def an_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnEngine]:
    monkeypatch.setitem(ATTENTION_BACKENDS._things, "checked", Checked)
    made: list[Checked] = []

    def make(**settings: Any) -> tuple[Harness, Checked]:
        engine = Harness(tiny, attention_backend="checked", **settings)
        attention = engine.executor._attention
        assert isinstance(attention, Checked)
        made.append(attention)
        return engine, attention

    yield make
    assert [attention.wrong for attention in made] == [[]]


def rows(engine: Harness, *rids: str) -> list[int]:
    return sorted(engine.decode.running[rid].row for rid in rids)


def test_hits_share_until_they_leave(an_engine: AnEngine) -> None:
    engine, attention = an_engine()
    begin = prompt(0, 41)
    engine.submit("first", [*begin, 1], max_new_tokens=50)
    for _ in range(4):
        engine.step()
    assert attention.sharing[-1] == []
    engine.submit("second", [*begin, 2], max_new_tokens=50)
    engine.submit("third", [*begin[:20], 3], max_new_tokens=50)
    engine.submit("other", prompt(9, 40), max_new_tokens=50)
    for _ in range(4):
        engine.step()
    assert attention.sharing[-1] == [(rows(engine, "first", "second"), 40)]
    engine.abort("second")
    for _ in range(3):
        engine.step()
    assert attention.sharing[-1] == [(rows(engine, "first", "third"), 16)]
    engine.submit("fourth", prompt(8, 40), max_new_tokens=50)
    engine.run()
    assert all(held == 16 for step in attention.sharing[-20:] for _, held in step)


def test_pages_computed_twice_are_shared_once_cached(an_engine: AnEngine) -> None:
    engine, attention = an_engine(overlap_depth=1)
    for rid in "ab":
        engine.submit(rid, [*prompt(0, 25), ord(rid) % 90], max_new_tokens=9)  # too short to wait for each other
    engine.run()
    assert [([0, 1], 24)] in attention.sharing
    assert attention.sharing.index([([0, 1], 24)]) == 1, "the first step began with pages of their own"


def test_a_row_that_changes_hands_between_two_steps_shares_nothing_any_more(an_engine: AnEngine) -> None:
    engine, attention = an_engine()
    for rid in "ab":
        engine.submit(rid, [*prompt(0, 41), ord(rid) % 90], max_new_tokens=30)
    for _ in range(4):
        engine.step()
    before = rows(engine, "a", "b")
    assert attention.sharing[-1] == [(before, 40)]
    steps = len(attention.sharing)
    engine.abort("b")
    engine.submit("c", prompt(1, 60), max_new_tokens=30)
    while "c" not in engine.decode.running:
        engine.step()
    assert len(attention.sharing) == steps, "no request decoded meanwhile"
    engine.step()
    assert rows(engine, "a", "c") == before
    assert attention.sharing[-1] == []
    engine.run()


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "max_total_tokens": 300, "overlap_depth": 1},
        {"page_size": 4, "max_total_tokens": 260, "overlap_depth": 1, "mixed_chunk": True, "chunked_prefill_size": 64},
        {"page_size": 16, "max_total_tokens": 320},
    ],
    ids=str,
)
def test_no_sequence_reads_the_pages_of_others(an_engine: AnEngine, settings: dict[str, Any]) -> None:
    engine, attention = an_engine(max_running_requests=6, **settings)
    engine.ratio.initial = engine.ratio.minimum = engine.ratio.value = 0.05  # optimistic: retractions happen
    rng = random.Random(0)
    families = [prompt(seed, 90) for seed in range(2)]
    for rid in range(16):
        ids = rng.choice(families)[: rng.randint(20, 90)] + prompt(100 + rid, rng.randint(1, 9))
        engine.submit(str(rid), ids, max_new_tokens=rng.choice([2, 20, 50]))
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(str(rng.randint(0, rid)))
    engine.run()
    assert sum(map(bool, attention.sharing)) > 50
    assert any(out.retractions for outs in engine.outs.values() for out in outs)
