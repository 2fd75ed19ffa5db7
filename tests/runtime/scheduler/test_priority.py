"""Priorities: which requests may have one, their order, and whose pages stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.messages import LARGEST_PRIORITY, FinishReason

pytestmark = pytest.mark.deep

PRIORITY: dict[str, Any] = {"schedule_policy": "priority"}


def order_of_endings(engine: Harness) -> list[str]:
    ended: list[str] = []
    while engine.step():
        ended += [rid for rid, outs in engine.outs.items() if outs[-1].finish is not None and rid not in ended]
    engine.assert_clean()
    return ended


# ---- valid priorities -----------------------------------------------------------------------------------


def test_a_priority_is_refused_if_nothing_uses_it(tiny: Path) -> None:
    engine = Harness(tiny)
    engine.submit("none", prompt(1, 5), priority=0)
    engine.submit("some", prompt(1, 5), priority=1)
    engine.run()
    assert engine.finish("none") == FinishReason("length")
    assert engine.finish("some").status == 400
    assert "ignores priorities" in str(engine.finish("some").message)


@pytest.mark.parametrize("settings", [PRIORITY, {"eviction_policy": "priority"}])
def test_a_priority_has_bounds(tiny: Path, settings: dict[str, Any]) -> None:
    engine = Harness(tiny, **settings)
    for rid, value in {"most": LARGEST_PRIORITY, "least": -LARGEST_PRIORITY, "more": LARGEST_PRIORITY + 1}.items():
        engine.submit(rid, prompt(1, 5), priority=value)
    engine.run()
    assert [engine.finish(rid).status for rid in ("most", "least", "more")] == [None, None, 400]


# ---- order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low_first", "expected"), [(False, "running high mid low"), (True, "running low mid high")])
def test_a_setting_decides_which_priority_is_urgent(tiny: Path, low_first: bool, expected: str) -> None:
    engine = Harness(tiny, max_running_requests=1, schedule_low_priority_values_first=low_first, **PRIORITY)
    engine.submit("running", prompt(0, 8), max_new_tokens=2)
    engine.step()
    for rid, value in {"low": -1, "mid": 0, "high": 1}.items():
        engine.submit(rid, prompt(value + 5, 8), max_new_tokens=2, priority=value)
    assert order_of_endings(engine) == expected.split()


def test_in_a_full_queue_the_least_urgent_request_gives_way(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=2, **PRIORITY)
    engine.submit("running", prompt(1, 8), max_new_tokens=20)
    engine.step()
    for rid, value in {"a": 1, "b": 1, "equal": 1, "urgent": 2}.items():
        engine.submit(rid, prompt(2, 8), max_new_tokens=2, priority=value)
    engine.run()
    statuses = {rid: engine.finish(rid).status for rid in engine.outs}
    assert statuses == {"running": None, "a": None, "b": 503, "equal": 503, "urgent": None}


def test_a_started_request_keeps_its_place_in_a_full_queue(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=1, **PRIORITY)
    engine.submit("begun", prompt(1, 8), max_new_tokens=20)
    engine.step()
    engine._retract(engine.decode.running["begun"])
    for rid in ("first", "second"):
        engine.submit(rid, prompt(2, 8), max_new_tokens=9, priority=50)
        engine.step()
    engine.run()
    assert [engine.finish(rid).status for rid in ("begun", "first", "second")] == [None, None, 503]
    assert engine.last("begun").retractions == 1


# ---- whose pages stay -----------------------------------------------------------------------------------


def test_pages_of_urgent_requests_stay_longer(tiny: Path) -> None:
    engine = Harness(tiny, max_total_tokens=160, eviction_policy="priority")
    engine.generate("urgent", prompt(1, 40), max_new_tokens=1, priority=3)
    for i in range(2, 8):
        engine.generate(str(i), prompt(i, 40), max_new_tokens=1, priority=-1)
    engine.generate("again", prompt(1, 40), max_new_tokens=1)
    assert engine.last("again").cached_tokens == 36
    engine.generate("others", prompt(2, 40), max_new_tokens=1)
    assert engine.last("others").cached_tokens == 0
