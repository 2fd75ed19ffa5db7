"""The picture of a step, drawn from a profiler's trace."""

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "docs" / "img").glob("*-timeline.json"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"timeline_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorder() -> Iterator[ModuleType]:
    folder = ROOT / "runtime" / "benchmarks"
    sys.path.insert(0, str(folder))
    yield load(folder / "step_timeline.py")
    sys.path.remove(str(folder))
    sys.modules.pop("engine", None)


@pytest.fixture(scope="module")
def artist() -> ModuleType:
    return load(ROOT / "scripts" / "step_timeline.py")


STEP_US = 1000.0


def trace(steps: int) -> list[dict[str, Any]]:
    """Return a trace of steps of a millisecond, each launched 500 us before the one before it ends. Times begin at
    7,000,000."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]

    def add(cat: str, name: str, start: float, end: float, **args: Any) -> None:
        timed = {"ph": "X", "cat": cat, "name": name, "ts": 7e6 + start, "dur": end - start}
        events.append(timed | {"args": args})

    for step in range(steps):
        begin = step * STEP_US  # on the device
        add("user_annotation", f"treeline:schedule {step}", begin - 520, begin + 20)
        add("user_annotation", f"treeline:prepare {step}", begin - 500, begin - 400)
        add("user_annotation", f"treeline:launch {step}", begin - 450, begin - 410)
        add("gpu_user_annotation", f"treeline:launch {step}", begin, begin + 900)
        add("cpu_op", "aten::copy_", begin - 490, begin - 480)
        add("cuda_runtime", "cudaGraphLaunch", begin - 440, begin - 420, correlation=step)
        add("user_annotation", f"treeline:process {step - 1}", begin - 400, begin + 10)
        add("user_annotation", f"treeline:wait {step - 1}", begin - 400, begin - 30)
        kernels = {"nvjet_tst_64x8": (0, 300), "_decode_shares": (301, 500), "merge_shares": (501, 550)}
        for name, (start, end) in (kernels | {"norm": (560, 600), "sm90_gemm": (600, 880)}).items():
            add("kernel", name, begin + start, begin + end, correlation=step)
        add("gpu_memcpy", "Memcpy DtoH", begin + 890, begin + 900, correlation=step)
        add("kernel", "of somebody else", begin + 900, begin + 950, correlation=10**6)
    return events


def test_three_steps_in_the_middle_of_a_trace_become_two_lanes(recorder: ModuleType) -> None:
    lanes = recorder.timeline(trace(9))
    device = [
        ("products", 0, 300),
        ("attention", 301, 550),
        ("rest", 560, 600),
        ("products", 600, 880),
        ("rest", 890, 900),
    ]
    assert lanes["gpu"] == [
        (kind, step, step * STEP_US + start, step * STEP_US + end) for step in range(3) for kind, start, end in device
    ]
    assert lanes["cpu"][:2] == [("process", -1, 0.0, 10.0), ("schedule", 0, 10.0, 20.0)], "cut where step 0 begins"
    assert [span for span in lanes["cpu"] if span.start >= 480][:7] == [
        ("schedule", 1, 480, 500),
        ("prepare", 1, 500, 550),
        ("launch", 1, 550, 590),
        ("prepare", 1, 590, 600),
        ("wait", 0, 600, 970),
        ("process", 0, 970, 1010),
        ("schedule", 1, 1010, 1020),
    ]
    assert lanes["cpu"][-1] == ("wait", 2, 2600, 2900), "cut where step 2 ends"
    for lane in lanes.values():
        assert all(before.end <= after.start for before, after in itertools.pairwise(lane))


def test_a_trace_without_enough_steps_of_a_device_is_none(recorder: ModuleType) -> None:
    with pytest.raises(ValueError, match="saw 2 whole steps on the device, 3 are needed"):
        recorder.timeline(trace(4))
    with pytest.raises(ValueError, match="saw 0 whole steps"):
        recorder.timeline([event for event in trace(9) if event.get("cat") != "kernel"][:1])


def test_the_recorder_names_the_phases_of_every_step(
    recorder: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorder, "SKIP", 3)
    monkeypatch.setattr(recorder, "STEPS", 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = recorder.SHAPES["tiny"] | {"num_hidden_layers": 1, "vocab_size": 4096}
    monkeypatch.setitem(recorder.SHAPES, "tiny", small)
    bench = recorder.Bench("tiny", tmp_path, {"threads": 1, "max_total_tokens": 256})
    methods = recorder.Scheduler.step, recorder.Scheduler._compute
    spans = recorder.cpu_lane(recorder.record(bench, 2, 20))
    assert (recorder.Scheduler.step, recorder.Scheduler._compute) == methods, "nothing is left of it"
    bench.engine.close()
    launches = sorted({span.step for span in spans if span.what == "prepare"})
    assert launches == list(range(launches[0], launches[0] + 4))
    for step in launches[1:]:
        own = [span.what for span in spans if span.step == step]
        assert own[:2] == ["schedule", "prepare"]
        assert [what for what in own if what in ("wait", "process", "send")] == ["process", "wait", "process", "send"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_picture_is_that_of_the_record(record: Path, artist: ModuleType) -> None:
    assert record.with_suffix(".svg").read_text() == artist.drawn(json.loads(record.read_text())), "make generate"
