"""Pages whose parts other ranks copy, too: nobody else uses a page or a slot before all of them have ended."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.tiered_engine import PROMPTS, answers, engine, report, round_of
from treeline_runtime.kvcache import KVPool


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
