"""The benchmark `media-sim`: images are found by what events say of them, in both forms."""

from pathlib import Path

import pytest
from support.bench import Remembered
from treeline_bench import media_sim as benchmark
from treeline_bench.context import Context
from treeline_bench.registry import BENCHMARKS
from treeline_epp.index.items import Items


def hits(folder: Path) -> dict[str, float]:
    rows = BENCHMARKS["media-sim"].run(Context(Remembered(), folder, quick=True))
    return {row.metric: row.value for row in rows if "hit_vs_oracle" in row.metric}


def test_chats_with_images_find_their_caches(tmp_path: Path) -> None:
    found = hits(tmp_path)
    assert found.keys() == {f"media.hit_vs_oracle.{form}" for form in benchmark.FORMS}
    assert min(found.values()) >= 0.95


def test_a_picker_that_learns_nothing_misses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Items, "learn", lambda *_: None)
    assert max(hits(tmp_path).values()) < 0.95
