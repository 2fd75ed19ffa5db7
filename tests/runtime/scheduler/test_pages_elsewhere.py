"""Pages whose parts other ranks copy, too: nobody else uses a page or a slot before all of them have ended."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from support.tiered_engine import PROMPTS, answers, engine, report, round_of
from treeline_runtime.core import Batch
from treeline_runtime.kvcache import KVPool
from treeline_runtime.scheduler.launched import Launched


class Others(Future[None]):
    """What the other ranks copy, which ends as soon as somebody waits for it."""

    def result(self, timeout: float | None = None) -> None:
        self.set_result(None)
        super().result(timeout)


@pytest.mark.parametrize(("name", "uses"), [("copy_out", 1), ("copy_in", 2)])
def test_a_copy_that_fails_on_rank_0_ends_after_those_of_the_others(
    name: str, uses: int, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, begun = answers(tiny), list[Others]()

    def elsewhere(*_: Any) -> Others:
        begun.append(Others())
        return begun[-1]

    def fail(*_: Any) -> None:
        raise MemoryError("no room to stage pages")

    with engine(tiny) as made:
        assert made.cache.tiers is not None
        for use in range(uses):
            round_of(made, str(use), expected)
        made.cache.tiers.store._elsewhere = elsewhere
        monkeypatch.setattr(KVPool, name, fail)
        for i in range(3):
            assert made.generate(f"again-{i}", PROMPTS[i]) == expected[i]
        assert len(begun) >= 3
        assert all(one.done() for one in begun)
        assert report(made).total_failures["copy"] >= 3 * 24
    assert [record.message for record in caplog.records].count("pages could not be copied") == 1, "a line a minute"


class Rank:
    """Another rank: of each page and slot, the tokens whose part is there. Its copies are late, in order, and may fail
    halfway."""

    def __init__(self, engine: Harness, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self._device: dict[int, list[int]] = {}
        self._host: dict[int, list[int]] = {}
        self._copies: deque[tuple[Future[None], bool, Sequence[int], Sequence[int]]] = deque()
        self.is_late = True
        self.wrong = 0
        """Pages that were read, and were not what had been computed."""
        self._launch = engine._compute
        engine._compute = self._compute  # type: ignore[method-assign]
        assert engine.cache.tiers is not None
        engine.cache.tiers.store._elsewhere = self._begin

    def _compute(self, batch: Batch) -> Launched:
        size = self._engine.config.page_size
        for req, start, end in zip(batch.reqs, batch.starts, batch.ends, strict=True):
            for at, page in enumerate(self._engine.table.pages[req.row, : -(-end // size)].tolist()):
                if (at + 1) * size <= start:
                    self.wrong += self._device.get(page) != req.tokens[: (at + 1) * size]
                else:
                    self._device[page] = req.tokens[: min(end, (at + 1) * size)]
        return self._launch(batch)

    def _begin(self, to_host: bool, pages: Sequence[int], slots: Sequence[int]) -> Future[None]:
        self._copies.append((Future(), to_host, [*pages], [*slots]))
        begun = self._copies[-1][0]
        if not self.is_late:
            self.copy()
        return begun

    def copy(self) -> None:
        """Do what was begun first."""
        if not self._copies:
            return
        done, to_host, pages, slots = self._copies.popleft()
        fails = self._rng.random() < 0.2
        for page, slot in list(zip(pages, slots, strict=True))[: len(pages) // 2 if fails else None]:
            if to_host:
                self._host[slot] = self._device[page]
            else:
                self._device[page] = self._host[slot]
        if fails:
            done.set_exception(RuntimeError("no room to stage pages"))
        else:
            done.set_result(None)

    def catch_up(self) -> None:
        self.is_late = False
        while self._copies:
            self.copy()


def flaky(copy: Callable[..., None], rng: random.Random) -> Callable[..., None]:
    """Let some of rank 0's copies fail."""

    def copies(*of: Any) -> None:
        if rng.random() < 0.4:
            raise MemoryError("no room to stage pages")
        copy(*of)

    return copies


@pytest.mark.parametrize("seed", range(2))
def test_another_rank_reads_what_it_computed_however_late_and_faulty_copies_are(
    seed: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    prompts = [prompt(i // 2, 64) + prompt(20 + i, 4 + 8 * (i % 2)) for i in range(12)]
    for name in ("copy_out", "copy_in"):
        monkeypatch.setattr(KVPool, name, flaky(getattr(KVPool, name), random.Random(seed)))
    with engine(tiny, host_cache=60 * 4 * 256) as made:
        rank = Rank(made, rng)
        for i in range(800):
            if rng.random() < 0.15:
                made.submit(str(i), rng.choice(prompts), max_new_tokens=rng.randint(1, 9))
            if rng.random() < 0.2:  # another one takes the pages that are loaded
                made.abort(rng.choice([*(req.rid for req in made.cache.loading), *made.decode.running, "nobody"]))
            if rng.random() < 0.1:
                rank.copy()
            made.step()
        rank.catch_up()
        made.run()
        assert not rank.wrong
        found = report(made)
        assert found.total_loaded_tokens["CPU"] > 0
        assert found.total_failures["copy"] > 0
