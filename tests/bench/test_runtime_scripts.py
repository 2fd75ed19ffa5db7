"""The scripts of runtime/benchmarks, and the benchmarks' reading of their rows."""

import importlib.util
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.bench import Remembered
from tokenizers import Tokenizer
from treeline_bench import scripts
from treeline_bench.context import BenchmarkError, Context
from treeline_bench.prompts import PromptMaker
from treeline_bench.registry import BENCHMARKS, select

FOLDER = Path(__file__).resolve().parents[2] / "runtime" / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def beside() -> Iterator[None]:
    """Make scripts importable from each other, as when one is run."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in ("engine", "dummy_model", "fake_server", "work"):
        sys.modules.pop(name, None)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- a made-up tokenizer


def test_every_token_of_a_dummy_model_is_a_word_and_comes_back(tmp_path: Path) -> None:
    script("dummy_model").write_model(tmp_path, "tiny")
    ids = random.Random(1).choices(range(4096), k=500)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode(text).ids == ids
    maker = PromptMaker.of_model(tmp_path)
    assert len(maker.words) == 4096
    assert maker.count(maker.text(77, random.Random(2))) == 77


@pytest.mark.deep
def test_other_engines_read_the_words_of_a_dummy_model_as_ours_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # takes seconds

    script("dummy_model").write_model(tmp_path, "tiny")
    ids = random.Random(1).choices(range(4096), k=500)
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == ids


# -- what the GPU waits for


def trace(gap_us: float, waits_us: float, steps: int = 20) -> list[dict[str, object]]:
    """Return a trace of steps: ten kernels of 10 µs with small gaps, and a wait after each step; and events that do not
    count."""
    events: list[dict[str, object]] = [{"ph": "M", "name": "process_name"}]
    now = 5000.0
    for _ in range(steps):
        for _ in range(10):
            events.append({"ph": "X", "cat": "kernel", "ts": now, "dur": 10.0})
            events.append({"ph": "X", "cat": "gpu_memcpy", "ts": now + 2, "dur": 3.0})  # beside it, on another stream
            events.append({"ph": "X", "cat": "cuda_runtime", "ts": now + 9, "dur": 500.0})  # the CPU's
            now += 10 + gap_us
        now += waits_us - gap_us
    return events


def test_idle_time_lies_between_steps_not_between_kernels() -> None:
    shares = script("profiled_scheduler").idle_shares
    busy = shares(trace(gap_us=0.0, waits_us=0.0), 20)
    assert (busy["idle_share"], busy["gap_share"]) == (0, 0)
    found = shares(trace(gap_us=1.0, waits_us=20.0, steps=400), 400)
    step_us = 10 * 10 + 9 * 1 + 20
    assert found["step_ms"] == pytest.approx(step_us / 1e3, rel=0.01)
    assert found["idle_share"] == pytest.approx(20 / step_us, rel=0.01)
    assert found["gap_share"] == pytest.approx(29 / step_us, rel=0.01)


def test_the_beginning_and_the_end_of_a_record_are_left_out() -> None:
    events = trace(gap_us=0.0, waits_us=0.0)
    for event in events[30:]:
        event["ts"] = float(event["ts"]) + 1e6  # type: ignore[arg-type]
    events[-3]["ts"] = 9e6
    assert script("profiled_scheduler").idle_shares(events, 20)["idle_share"] == 0


def test_a_profiler_that_saw_nothing_is_no_idle_gpu() -> None:
    with pytest.raises(ValueError, match="0 kernels and copies in 20 steps"):
        script("profiled_scheduler").idle_shares([{"ph": "X", "cat": "cuda_runtime", "ts": 1.0, "dur": 1.0}], 20)


# -- what chunks cost


def test_processes_without_counted_work_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = script("streamed_chunks")

    async def streams(port: int, count: int, tokens: int) -> int:
        return count * tokens

    monkeypatch.setattr(found, "streams", streams)
    monkeypatch.setattr(found, "cpu_s", lambda pid: 0.0)
    one = found.Server(1, http=2, detokenizer=4)
    assert found.measure(one, 1, 4) == {"chunks_a_token": 1.0, "http.chunk_us": 0.0, "detokenizer.chunk_us": 0.0}
    spent = iter([0.0, 0.0, 0.04, 0.01])
    monkeypatch.setattr(found, "cpu_s", lambda pid: next(spent))
    assert found.measure(one, 1, 4)["http.limit_chunks_s"] == 4 / 0.04


# -- hit rates


def test_the_best_hit_rate_computes_everything_once() -> None:
    """Two questions follow the same examples: the second finds the examples cached, and no cache could give more."""
    found = script("radix")
    programs = found.Shapes(0, 0.1).few_shot(subjects=2, questions=2, shots=64, question=16)
    rates = found.hit_rates(programs, {"page_size": 1, "threads": 1})
    subjects = len(programs) // 2
    assert rates.prompt == len(programs) * 80
    assert rates.best == subjects * 64
    assert rates.found == rates.best


def test_nested_calls_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        def outer(self) -> str:
            return self.inner() + " in outer"

        def inner(self) -> str:
            return "inner"

    target, radix = Target(), script("radix")
    clock = radix.Clock(target, ("outer", "inner"))
    ticks = itertools.count()
    monkeypatch.setattr(radix.time, "perf_counter", lambda: float(next(ticks)))
    assert target.outer() == "inner in outer"
    assert clock.seconds == 2, "the clock is read as both begin, and as the outer one ends"
    target.inner()
    assert clock.seconds == 3


# -- the benchmarks that wrap them


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Replace a script of `runtime/benchmarks` by one that prints these rows."""
    monkeypatch.setattr(scripts, "ROOT", tmp_path)

    def put(name: str, **values: float) -> None:
        lines = [json.dumps({"metric": name, "value": value}) for name, value in values.items()]
        path = tmp_path / "runtime" / "benchmarks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"print({chr(10).join(lines)!r})")

    return put


def test_rows_of_the_server_have_the_bounds_that_were_set(
    printing: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, context = BENCHMARKS["server"], Context(Remembered(), tmp_path)
    monkeypatch.setattr(scripts, "has_cuda", lambda: True)
    monkeypatch.setattr(scripts, "shapes", lambda: ("tiny",))
    values = {"server_over_offline.tiny": 0.57, "overlap.idle_share.tiny": 0.015, "start.warm_s.tiny": 6.0}
    printing("server.py", **values)
    ratios = {row.metric: row.ratio for row in server.run(context)}
    assert ratios == {"server_over_offline.tiny": 0.6, "overlap.idle_share.tiny": 0.5, "start.warm_s.tiny": 0.5}
    monkeypatch.setattr(scripts, "has_cuda", lambda: False)  # the bounds are a GPU's
    assert [row.ratio for row in server.run(context)] == [None, None, None]
    printing("server.py", other=1.0)
    with pytest.raises(BenchmarkError, match="did not report server_over_offline"):
        server.run(context)


def test_a_step_is_measured_without_one_time_and_refused_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = script("engine")
    bench = object.__new__(found.Bench)
    seconds = iter([9.0, 1.0, 1.128])  # the first run pays for what is done once
    monkeypatch.setattr(found.Bench, "run", lambda *_: next(seconds))
    assert bench.step_ms(1, 512, 1) == pytest.approx(1.0)
    seconds = iter([1.0, 3.0, 1.128])
    with pytest.raises(RuntimeError, match="measure again"):
        bench.step_ms(1, 512, 1)


CPU = [f"cpu.vs_transformers.t{t}.{name}" for t in (1, 2) for name in ("b1", "b8", "mixed.b8", "prefill.4096")]


def test_rows_of_radix_and_cpu(printing: Callable[..., None], tmp_path: Path) -> None:
    printing("radix.py", **{"radix.hit_vs_optimal": 0.96, "radix.share.tiny": 0.006})
    optimal, share = BENCHMARKS["radix"].run(Context(Remembered(), tmp_path, quick=True))
    assert (optimal.ratio, share.ratio) == (1.0, 2.0)
    printing("versus_transformers.py", **dict.fromkeys(CPU, 1.4))
    rows = BENCHMARKS["cpu"].run(Context(Remembered(), tmp_path))
    assert {(row.metric, row.value, row.unit) for row in rows} == {(name, 1.4, "×") for name in CPU}


def test_rows_beside_vllm(printing: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm, context = BENCHMARKS["vllm"], Context(Remembered(), tmp_path)
    monkeypatch.delenv(scripts.VLLM_FOLDER, raising=False)
    with pytest.raises(BenchmarkError, match=f"vLLM is not installed here; {scripts.VLLM_FOLDER}"):
        vllm.run(context)
    monkeypatch.setenv(scripts.VLLM_FOLDER, str(tmp_path))
    monkeypatch.setattr(scripts, "has_cuda", lambda: False)
    with pytest.raises(BenchmarkError, match="needs a CUDA device"):
        vllm.run(context)
    monkeypatch.setattr(scripts, "has_cuda", lambda: True)
    monkeypatch.setattr(scripts, "shapes", lambda: ("tiny",))
    printing("versus_vllm.py", **{"offline.vs_vllm.tiny": 1.04})
    (row,) = vllm.run(context)
    assert (row.metric, row.value, row.unit) == ("offline.vs_vllm.tiny", 1.04, "times")
    assert "vllm" not in {benchmark.name for benchmark in select([])}
    assert [benchmark.name for benchmark in select(["vllm"])] == ["vllm"]


@pytest.mark.integration
@pytest.mark.deep
def test_both_engines_of_the_comparison_compute_the_same_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that answers after the given time stands in for vLLM."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, folder = script("versus_vllm"), tmp_path / "site"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(STAND_IN)
    script("dummy_model").write_config(tmp_path, "tiny")
    monkeypatch.setattr(found, "CONTEXT", 256)
    work = found.Work.of(3, 20, seed=0)
    found.measure(found.ours(str(tmp_path), ranks=1), [work], tmp_path / "ours.json")
    assert len(json.loads((tmp_path / "ours.json").read_text())) == 1
    rate = found.by("vllm", tmp_path, ["--shape", "tiny", "--rounds", "1"], str(folder))
    assert rate > 0
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('no GPU')")
    (tmp_path / "vllm.json").unlink()
    with pytest.raises(SystemExit, match="vllm ended with status 1"):
        found.by("vllm", tmp_path, ["--shape", "tiny", "--rounds", "1"], str(folder))


STAND_IN = """
from types import SimpleNamespace

def SamplingParams(max_tokens, **others):
    return max_tokens

class LLM:
    def __init__(self, folder, **settings):
        assert settings["load_format"] == "dummy"

    def generate(self, prompts, lengths, use_tqdm):
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * n)]) for n in lengths]
"""


@pytest.mark.integration
@pytest.mark.deep
def test_the_engine_is_compared_with_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(scripts, "THREADS", (1,))
    rows = BENCHMARKS["cpu"].run(Context(Remembered(), tmp_path, quick=True))
    assert {row.metric for row in rows} >= {name for name in CPU if ".t1." in name}
    assert all(row.value > 0 for row in rows)


@pytest.mark.integration
@pytest.mark.deep
def test_a_server_of_a_dummy_model_answers_the_scripts_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = script("server")
    found.write_model(tmp_path, "tiny")
    [rate] = found.through_http("tiny", tmp_path, {"threads": 1}, [found.Work.of(4, 20, seed=0)])
    assert rate > 0
    said = json.loads(capsys.readouterr().out)
    assert said["metric"] == "start.warm_s.tiny"
    assert said["value"] > 0
