"""The benchmarks' inputs and what they compute from reports. Nothing is started here."""

import json
import random
from pathlib import Path

import pytest
from support.bench import Remembered
from treeline_bench import picker, rig, scripts
from treeline_bench.context import BenchmarkError, Context
from treeline_bench.processes import free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.registry import BENCHMARKS
from treeline_bench.rig import chat_body
from treeline_bench.routing import Settings, checked, rows_of
from treeline_bench.serving.datasets import Words
from treeline_bench.serving.messages import LoadReport, Record
from treeline_bench.serving.summary import Summary, summarise
from treeline_sim.connection import CASE_HEADER

SMALL = Settings(groups=3, repeats=4, prefix=64, suffix=16, output=2)


# -- routing


def test_requests_share_prefixes_and_come_in_a_fixed_order(maker: PromptMaker) -> None:
    conversations = SMALL.plan().conversations(Words(maker), 0)
    assert conversations == SMALL.plan().conversations(Words(maker), 0)
    prompts = [str(conversation.turns[0].piece) for conversation in conversations]
    assert len(set(prompts)) == SMALL.requests
    assert all(maker.count(prompt) == SMALL.prompt for prompt in prompts)
    assert len({tuple(prompt.split()[: SMALL.prefix]) for prompt in prompts}) == SMALL.groups


def summary(cached: int = 64, prompt: int = 80, output: int = 2, ms: float = 10, error: str = "") -> Summary:
    """Return a summary of two requests; the second fails if `error` is given."""
    whole = Record(0, 0, 80, 2, 0, done_ns=20_000_000, tokens_ns=[int(ms * 1e6)])
    whole.prompt_tokens, whole.output_tokens, whole.cached_tokens = prompt, output, cached
    other = Record(1, 0, 80, 2, 0, done_ns=20_000_000, error="HTTP 503") if error else whole
    return summarise([LoadReport([whole, other], 0, [], 0.1)], {})


@pytest.mark.parametrize("wrong", [{"prompt": 79}, {"output": 1}])
def test_answers_of_another_length_than_requested_are_refused(wrong: dict[str, int]) -> None:
    assert checked(summary(error="HTTP 503"), SMALL).completed == 1
    with pytest.raises(BenchmarkError, match="the runtimes counted"):
        checked(summary(**wrong), SMALL)  # type: ignore[arg-type]


def test_rows_compare_with_the_oracle_and_with_random() -> None:
    rows = {row.metric: row for row in rows_of({"treeline": summary(), "random": summary(0, ms=40, error="x")}, SMALL)}
    best = SMALL.oracle_cached / (SMALL.requests * SMALL.prompt)
    assert rows["routing.hit_rate.treeline"].ratio == pytest.approx(0.8 / best, rel=1e-3)
    assert rows["routing.computed_tokens.treeline"].value == 2 * 16
    assert rows["routing.computed_tokens.random"].value == 80
    assert rows["routing.ttft_ms.p50.treeline"].ratio == 0.25
    assert rows["routing.errors.random"].value == 1


# -- picker


@pytest.mark.parametrize("size", [1_000, 20_001])
def test_bodies_have_exactly_the_size_asked_for(maker: PromptMaker, size: int) -> None:
    body = chat_body(size, maker, random.Random(1))
    assert len(body) == size
    system, user = json.loads(body)["messages"]
    assert len(system["content"]) > len(user["content"]) > 0


def test_every_prompt_is_held_by_one_engine(maker: PromptMaker) -> None:
    settings = rig.Settings({"1kb": 5, "220kb": 2}, {"1kb": 600, "220kb": 900}, picker.CONCURRENCY)
    load = rig.build_load(settings, maker, 2)
    calls = [call for group in load.calls.values() for call in group]
    assert [call.headers[CASE_HEADER] for call in calls] == [str(index) for index in range(7)]
    first, second = load.cases
    assert [case.body for case in first] == [case.body for case in second] == [call.body for call in calls]
    assert all(one.held != other.held for one, other in zip(first, second, strict=True))


def test_a_picker_is_measured_by_its_own_cpu_time_and_beside_bare_envoy() -> None:
    def answered(ms: float, header: str) -> list[Record]:
        return [Record(call, 0, 0, 0, 0, sent_ns=1, done_ns=int(ms * 1e6) + 1, header=header) for call in range(4)]

    bare, asking = answered(1.0, ""), answered(3.0, "16")
    rows = {row.metric: row.value for row in picker.rows_of(bare, asking, {"1kb": (answered(2000, "16"), 0.5)})}
    assert rows["picker.added_ms.p50"] == rows["picker.added_ms.p99"] == 2.0
    assert (rows["picker.rps_per_core.1kb"], rows["picker.rps.1kb"], rows["picker.hit_rate.1kb"]) == (8.0, 2.0, 1.0)


# -- scripts of other rooms

ROWS = [{"metric": name, "value": index + 0.5, "unit": "x", "more": 1} for index, name in enumerate(("a.x", "a.y"))]


@pytest.mark.parametrize("printed", [json.dumps(ROWS), "\n".join(json.dumps(each) for each in ROWS)])
def test_rows_are_read_as_a_list_or_a_line_each(printed: str) -> None:
    assert scripts.parse(printed, ("a.y",), "it") == {"a.x": 0.5, "a.y": 1.5}


@pytest.mark.parametrize(
    ("printed", "problem"), [("[]", "did not report"), ("oops", "something other"), ("", "did not report")]
)
def test_a_missing_row_is_an_error(printed: str, problem: str) -> None:
    with pytest.raises(BenchmarkError, match=problem):
        scripts.parse(printed, ("a.x",), "it")


def script(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


def test_the_tree_is_measured_in_its_own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = """
import json, sys
names = ["rss_mb.100x30k"] if "--full" in sys.argv else ["vs_dynamo.lookup"] if "--versus-dynamo" in sys.argv else [
    "match_us.2700", "match_us.100k", "ingest_blocks_s", "remove_blocks_s", "bytes_per_block", "not_reported"
]
print(json.dumps([{"metric": f"tree.{name}", "value": 1.5} for name in names]))
"""
    times = [f"tree.event_to_routable_ms.{share}.{count}" for count in (8, 100) for share in ("p50", "p99")]
    script(tmp_path, "epp/benchmarks/tree.py", code)
    script(tmp_path, "epp/benchmarks/events.py", f"print({json.dumps([{'metric': n, 'value': 1.5} for n in times])!r})")
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    for there, beside in ((None, []), (object(), ["tree.vs_dynamo.lookup"])):
        monkeypatch.setattr("importlib.util.find_spec", lambda _name, there=there: there)
        display = Remembered()
        rows = [row.metric for row in BENCHMARKS["tree"].run(Context(display, tmp_path, quick=True))]
        assert rows[0] == "tree.match_us.2700"
        assert rows[5:] == [*beside, *times]
        assert ("not beside Dynamo's" in display.phases[1]) == (there is None)
    rows = [row.metric for row in BENCHMARKS["tree"].run(Context(display, tmp_path))]
    assert rows[5] == "tree.rss_mb.100x30k"


def test_a_script_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    script(tmp_path, "epp/benchmarks/scrape.py", "raise SystemExit('it is broken')")
    with pytest.raises(BenchmarkError, match="it is broken"):
        BENCHMARKS["scrape"].run(Context(Remembered(), tmp_path))
    with pytest.raises(BenchmarkError, match="not here"):
        BENCHMARKS["radix"].run(Context(Remembered(), tmp_path))


# -- engine


def test_the_engine_is_compared_with_the_limits_of_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = {"start.tiny": 2.0, "decode.tiny.b1.ctx512": 5.0, "floor.decode.tiny.b1.ctx512": 4.0}
    lines = [json.dumps({"metric": name, "value": value}) for name, value in figures.items()]
    monkeypatch.setattr(scripts, "has_cuda", lambda: False)
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    script(tmp_path, "runtime/benchmarks/engine.py", f"print({chr(10).join(lines)!r})")
    start, decode = BENCHMARKS["engine"].run(Context(Remembered(), tmp_path))
    assert (start.metric, start.value, start.ratio) == ("engine.start.tiny", 2.0, None)
    assert (decode.metric, decode.reference, decode.ratio) == ("engine.decode.tiny.b1.ctx512", 4.0, 1.25)


@pytest.mark.deep
def test_the_engine_really_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scripts, "has_cuda", lambda: False)
    rows = {row.metric: row.value for row in BENCHMARKS["engine"].run(Context(Remembered(), tmp_path, quick=True))}
    assert rows["engine.offline.tiny"] > 0
    assert rows["engine.decode.tiny.b4.ctx64"] > 0


# -- ports


def test_free_ports_are_different_and_have_free_neighbours() -> None:
    ports = free_ports(5, run=2) + free_ports(5, run=2)
    assert len({port + offset for port in ports for offset in range(2)}) == 20
