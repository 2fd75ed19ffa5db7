"""What a scheduler that stands still says of itself."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt


@pytest.mark.parametrize("where", ["launch", "result"])
def test_the_batch_that_hangs_is_described_without_its_text(tiny: Path, where: str) -> None:
    engine = Harness(tiny, overlap_depth=0)
    engine.submit("first", prompt(1, 20), max_new_tokens=8)
    for _ in range(3):
        engine.step()
    engine.submit("second", prompt(2, 9))
    hanging, go_on = threading.Event(), threading.Event()
    launch = engine._compute

    def hang() -> None:
        hanging.set()
        assert go_on.wait(30)

    def slow(batch: Any) -> Any:
        if where == "launch":
            hang()
            return launch(batch)
        launched = launch(batch)
        result = launched.result

        def slow_result() -> Any:
            hang()
            return result()

        launched.result = slow_result  # type: ignore[method-assign]
        return launched

    engine._compute = slow  # type: ignore[method-assign]
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    assert hanging.wait(30)
    said = engine.activity.describe().splitlines()
    engine._compute = launch  # type: ignore[method-assign]
    go_on.set()
    stepping.join(30)
    what = {"launch": "launching", "result": "waiting for results"}[where]
    assert re.fullmatch(rf"{what} for \d+\.\d s: prefill, 1 requests, 9 tokens", said[0])
    assert said[1] == "  'second': prompt 9, output 0, cached 0, computes 0 to 9, 0 retractions"
    assert said[2].startswith(f"{1 if where == 'launch' else 2} running, 0 waiting, ")
    engine.run()


def test_a_large_batch_is_described_in_few_lines(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=70)
    for i in range(70):
        engine.submit(str(i), [i])
    engine.step()
    said = engine.activity.describe().splitlines()
    assert len(said) == 1 + 64 + 1 + 1
    assert said[-2] == "  … and 6 others"
    engine.run()
    assert engine.activity.describe().startswith("choosing a batch for")
