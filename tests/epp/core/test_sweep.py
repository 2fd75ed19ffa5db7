"""After a request for an unknown model, engines are polled: each once, a few at a time, and at a bounded rate."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.endpoints.watcher import SWEEP_INTERVAL_S, SWEPT_AT_ONCE, SWEPT_EACH_SECOND, Sweep

BEAT_S = 0.05


@settings(derandomize=True, max_examples=50)
@given(st.integers(0, 300), st.integers(1, 200))
def test_engines_are_polled_at_a_bounded_rate_however_many_requests_miss(count: int, beats: int) -> None:
    names = [f"e{n}" for n in range(count)]
    sweep, asked = Sweep(), list[str]()
    for beat in range(beats):
        sweep.begin(names, beat * BEAT_S)
        now = sweep.take()
        assert len(now) <= SWEPT_AT_ONCE
        asked += now
    assert len(asked) <= count + SWEPT_EACH_SECOND * beats * BEAT_S + count * (beats * BEAT_S / SWEEP_INTERVAL_S) * (
        count < 50
    )
    assert asked == (names * (len(asked) // max(1, count) + 1))[: len(asked)], "each in turn"


def test_a_miss_polls_at_the_next_beat_and_a_second_one_after_a_pause() -> None:
    sweep = Sweep()
    sweep.begin(["a", "b"], 0.0)
    sweep.begin(["a", "b"], 0.0)
    assert sweep.take() == ["a", "b"]
    sweep.begin(["a", "b"], SWEEP_INTERVAL_S - 0.01)
    assert sweep.take() == []
    sweep.begin(["a", "b"], SWEEP_INTERVAL_S)
    assert sweep.take() == ["a", "b"]
