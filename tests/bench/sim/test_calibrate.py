"""Constants from measured steps, and the steps that they were made of."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from treeline_bench.context import BenchmarkError
from treeline_bench.sim import calibrate
from treeline_bench.sim.calibrate import errors, fit
from treeline_bench.sim.model.measured import Measured, anchors_of, read
from treeline_bench.sim.model.presets import PRESETS
from treeline_bench.sim.model.speed import Speed

NAMES = [*(f"prefill.{n}" for n in (64, 256, 1024, 2048)), "decode.b1.ctx64", "decode.b8.ctx512", "decode.b32.ctx256"]


def steps_of(speed: Speed) -> dict[str, float]:
    return anchors_of(Measured(1024, dict.fromkeys(NAMES, 1.0), speed))


@pytest.mark.parametrize(
    "speed",
    [
        Speed(fixed_s=2e-3, sequence_s=2e-4, token_s=8e-5, attention_s=1e-7, context_s=5e-7),
        Speed(fixed_s=5e-3, token_s=1e-6, attention_s=1e-9, context_s=1e-8),
    ],
)
def test_the_constants_that_made_the_steps_are_found_again(speed: Speed) -> None:
    found = fit(steps_of(speed), 1024)
    assert steps_of(found) == pytest.approx(steps_of(speed), rel=1e-6)
    assert found.sequence_s == pytest.approx(speed.sequence_s, abs=1e-9)


def test_no_constant_is_negative_whatever_was_measured() -> None:
    steps = steps_of(Speed(fixed_s=2e-3, token_s=8e-5, attention_s=1e-7))
    steps["decode.b32.ctx256"] *= 0.5  # as if more context took less time
    found = fit(steps, 1024)
    assert min(found.fixed_s, found.sequence_s, found.token_s, found.attention_s, found.context_s) >= 0


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"prefill.64": 1.0}, "too few"),
        ({**dict.fromkeys(NAMES, 1.0), "prefill.64": -0.1}, "measure again"),
        ({**dict.fromkeys(NAMES, 1.0), "prefill.64": float("nan")}, "measure again"),
        ({"start": 1.0}, "neither"),
    ],
)
def test_figures_that_say_nothing_are_refused(steps: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(steps, 1024)


def test_the_tiny_model_on_a_cpu_is_as_it_was_measured() -> None:
    measured = read("tiny-cpu")
    off = {name: abs(share) for name, share in errors(measured).items()}
    assert len(off) == 11
    # Between 256 and 320 tokens the time of a prompt jumps, which no polynomial of its length can say.
    assert off.pop("prefill.512") < 0.25
    assert max(off.values()) < 0.08
    assert PRESETS["tiny-cpu"].engine.speed == measured.speed
    assert asdict(fit(measured.anchors_ms, measured.chunk_tokens)) == pytest.approx(
        asdict(measured.speed), rel=1e-6, abs=1e-12
    )


def test_what_is_measured_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(Speed(fixed_s=2e-3, sequence_s=2e-4, token_s=8e-5, attention_s=1e-7, context_s=5e-7))
    lines = "\n".join(json.dumps({"metric": name, "value": value}) for name, value in steps.items())
    args = argparse.Namespace(model=tmp_path, rounds=1, write=tmp_path / "found.json")
    monkeypatch.setattr(calibrate, "printed", lambda *rest, **more: lines)
    assert calibrate.calibrate(args, Console(quiet=True)) == 0
    assert set(json.loads(args.write.read_text())["anchors_ms"]) == set(NAMES)
    monkeypatch.setattr(calibrate, "printed", lambda *rest, **more: "no rows")
    with pytest.raises(BenchmarkError, match="something else"):
        calibrate.calibrate(args, Console(quiet=True))
