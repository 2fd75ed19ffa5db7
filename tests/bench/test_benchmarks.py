"""What the benchmarks build and what they make of reports; nothing is started here."""

import json
import random
from pathlib import Path

import pytest
from support.bench import Remembered
from treeline_bench import engine, picker, routing, tree
from treeline_bench.client.messages import Outcome, Report
from treeline_bench.context import BenchmarkError, Context
from treeline_bench.picker import chat_body
from treeline_bench.processes import free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.routing import Settings, build_calls, measure, rows_of, usage_of
from treeline_bench.sim.http import CASE_HEADER

SMALL = Settings(groups=3, repeats=4, prefix=64, suffix=16, output=2)


@pytest.fixture(scope="module")
def maker(model: Path) -> PromptMaker:
    return PromptMaker.of_model(model)


# -- routing


def test_the_cache_holds_half_of_the_prefixes_and_not_all() -> None:
    for settings in (routing.FULL, routing.QUICK):
        everything = settings.groups * settings.prefix
        running = settings.concurrency * (settings.prompt + settings.output)
        assert everything // 2 < settings.cache < everything
        assert running // 2 <= settings.cache  # half of the clients' requests run on each runtime
        assert settings.cache % routing.PAGE_TOKENS == 0


def test_requests_share_prefixes_and_come_in_a_fixed_order(maker: PromptMaker) -> None:
    calls = build_calls(SMALL, maker)
    assert calls == build_calls(SMALL, maker)
    prompts = [json.loads(call.body)["prompt"] for call in calls]
    assert len(set(prompts)) == SMALL.requests
    assert all(maker.count(prompt) == SMALL.prompt for prompt in prompts)
    assert len({tuple(prompt.split()[: SMALL.prefix]) for prompt in prompts}) == SMALL.groups
    assert json.loads(calls[0].body)["stream_options"] == {"include_usage": True}


def stream(prompt: int = 80, cached: int | None = 64, completion: int = 2, end: bytes = b"data: [DONE]\n\n") -> bytes:
    usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    chunks = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + end


def test_usage_is_read_from_the_end_of_a_stream() -> None:
    usage = usage_of(stream())
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached) == (80, 64)
    without = usage_of(stream(cached=None))
    assert without is not None
    assert without.cached == 0


@pytest.mark.parametrize("body", [b"", stream(end=b""), b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'])
def test_a_stream_that_does_not_end_well_has_no_usage(body: bytes) -> None:
    assert usage_of(body) is None


def outcome(body: bytes, status: int = 200) -> Outcome:
    return Outcome(0, status, sent_ns=1_000_000, first_ns=11_000_000, done_ns=21_000_000, body=body)


def test_only_complete_answers_count() -> None:
    report = Report([outcome(stream()), outcome(stream(end=b"")), outcome(b"", status=503), outcome(stream(cached=0))])
    found = measure(report, SMALL)
    assert (found.prompt_tokens, found.cached_tokens, found.errors) == (160, 64, 2)
    assert found.ttft_ms == [10, 10]


@pytest.mark.parametrize("body", [stream(prompt=79), stream(completion=1)])
def test_other_lengths_than_asked_for_are_refused(body: bytes) -> None:
    with pytest.raises(BenchmarkError, match="a runtime counted"):
        measure(Report([outcome(body)]), SMALL)


def test_rows_compare_with_the_oracle_and_with_random() -> None:
    total = SMALL.requests * SMALL.prompt
    good = routing.Measured(total, SMALL.oracle_cached, [10.0, 20.0], 0, 1.0)
    bad = routing.Measured(total, 0, [40.0, 80.0], 1, 4.0)
    rows = {row.metric: row for row in rows_of({"treeline": good, "random": bad}, SMALL)}
    assert rows["routing.hit_rate.treeline"].ratio == 1
    assert rows["routing.computed_tokens.treeline"].ratio == 1
    assert rows["routing.computed_tokens.random"].value == total
    assert rows["routing.ttft_ms.p50.treeline"].ratio == 0.25
    assert rows["routing.errors.random"].value == 1


def test_the_oracle_computes_each_prefix_once() -> None:
    assert routing.FULL.oracle_cached == 16 * 7 * 1024


# -- picker


@pytest.mark.parametrize("size", [1_000, 20_001])
def test_bodies_have_exactly_the_size_asked_for(maker: PromptMaker, size: int) -> None:
    body = chat_body(size, maker, random.Random(1))
    assert len(body) == size
    system, user = json.loads(body)["messages"]
    assert len(system["content"]) > len(user["content"]) > 0


def test_every_prompt_is_held_by_one_engine(maker: PromptMaker) -> None:
    settings = picker.Settings({"1kb": 5, "220kb": 2}, {"1kb": 600, "220kb": 900}, picker.CONCURRENCY)
    load = picker.build_load(settings, maker)
    calls = [call for group in load.calls.values() for call in group]
    assert [call.headers[CASE_HEADER] for call in calls] == [str(index) for index in range(7)]
    first, second = load.cases
    assert [case.body for case in first] == [case.body for case in second] == [call.body for call in calls]
    assert all(one.held != other.held for one, other in zip(first, second, strict=True))


def test_equal_picks_and_spread_tell_where_prompts_went() -> None:
    def went(call: int, *engines: int) -> list[Outcome]:
        return [Outcome(call, 200, header="16" if engine == call % 2 else "0") for engine in engines]

    held = went(0, 0, 0) + went(1, 1, 1)
    assert [picker.engine_of(outcome) for outcome in held] == [0, 0, 1, 1]
    assert (picker.equal_picks(held), picker.spread(held)) == (1.0, 1.0)
    torn = went(0, 0, 0, 1) + went(1, 0)
    assert [picker.engine_of(outcome) for outcome in torn] == [0, 0, 1, 0]
    assert (picker.equal_picks(torn), picker.spread(torn)) == (0.75, 1.5)


def test_rows_of_pickers_in_company_are_those_that_are_described() -> None:
    outcomes = [Outcome(call, 200, sent_ns=0, done_ns=2_000_000_000, header="16") for call in range(4)]
    rows = {row.metric: row.value for row in picker.company_rows({"peers2": (Report(outcomes), 0.5)})}
    assert rows == {
        "picker.peers2.rps_per_core.1kb": 8.0,
        "picker.peers2.rps.1kb": 2.0,
        "picker.peers2.ms.p99": 2000.0,
        "picker.peers2.equal_picks": 1.0,
        "picker.peers2.spread": 1.0,
    }


def test_peers_share_a_key_and_each_others_names(tmp_path: Path) -> None:
    places = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    first, second = picker._picker_commands(picker.COMPANY["peers2"], places, tmp_path)
    for words, ports in ((first, places[0]), (second, places[1])):
        assert words[words.index("--peers") + 1] == "127.0.0.1:5,127.0.0.1:10"
        assert words[words.index("--grpc-port") + 1] == str(ports[0])
        assert words[words.index("--peer-port") + 1] == str(ports[-1])
    assert (tmp_path / "keys").is_dir()
    (alone,) = picker._picker_commands(picker.COMPANY["one"], places[:1], tmp_path)
    assert "--peers" not in alone


# -- tree

ROWS = [{"metric": name, "value": index + 0.5, "unit": "x", "more": 1} for index, name in enumerate(tree.METRICS)]


@pytest.mark.parametrize("printed", [json.dumps(ROWS), "\n".join(json.dumps(each) for each in ROWS)])
def test_rows_are_read_as_a_list_or_a_line_each(printed: str) -> None:
    assert tree.parse(printed) == {name: index + 0.5 for index, name in enumerate(tree.METRICS)}


@pytest.mark.parametrize(
    ("printed", "problem"), [("[]", "did not report"), ("oops", "something else"), ("", "did not report")]
)
def test_a_missing_row_is_an_error(printed: str, problem: str) -> None:
    with pytest.raises(BenchmarkError, match=problem):
        tree.parse(printed)


def script(folder: Path, code: str, name: str = "tree.py") -> Path:
    path = folder / name
    path.write_text(code)
    return path


def test_the_tree_is_measured_in_its_own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"""
import json, sys
wanted = {tree.RESIDENT!r} if "--full" in sys.argv else {tree.BESIDE!r} if "--versus-dynamo" in sys.argv else None
print(json.dumps([{{"metric": name, "value": 1.5}} for name in wanted or {tree.METRICS!r}]))
"""
    events = [{"metric": name, "value": 1.5} for name in tree.ROUTABLE]
    monkeypatch.setattr(tree, "SCRIPT", script(tmp_path, code))
    monkeypatch.setattr(tree, "EVENTS", script(tmp_path, f"print({json.dumps(events)!r})", "events.py"))
    for there, beside in ((None, ()), (object(), tree.BESIDE)):
        monkeypatch.setattr(tree, "find_spec", lambda _name, there=there: there)
        display = Remembered()
        rows = tree.run(Context(display, tmp_path, quick=True))
        assert [row.metric for row in rows] == [*tree.METRICS, *beside, *tree.ROUTABLE]
        assert ("not beside Dynamo's" in display.phases[1]) == (there is None)
    rows = tree.run(Context(display, tmp_path))
    assert [row.metric for row in rows] == [*tree.METRICS, *tree.RESIDENT, *tree.BESIDE, *tree.ROUTABLE]


def test_a_tree_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tree, "SCRIPT", script(tmp_path, "raise SystemExit('it is broken')"))
    with pytest.raises(BenchmarkError, match="it is broken"):
        tree.run(Context(Remembered(), tmp_path))
    monkeypatch.setattr(tree, "SCRIPT", tmp_path / "nothing.py")
    with pytest.raises(BenchmarkError, match="not here"):
        tree.run(Context(Remembered(), tmp_path))


# -- engine


def test_the_engine_is_measured_beside_what_the_device_could_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = {"start.tiny": 2.0, "decode.tiny.b1.ctx512": 5.0, "floor.decode.tiny.b1.ctx512": 4.0}
    lines = [json.dumps({"metric": name, "value": value}) for name, value in figures.items()]
    monkeypatch.setattr(engine, "has_cuda", lambda: False)
    monkeypatch.setattr(engine, "SCRIPT", script(tmp_path, f"print({chr(10).join(lines)!r})"))
    start, decode = engine.run(Context(Remembered(), tmp_path))
    assert (start.metric, start.value, start.ratio) == ("engine.start.tiny", 2.0, None)
    assert (decode.metric, decode.reference, decode.ratio) == ("engine.decode.tiny.b1.ctx512", 4.0, 1.25)


@pytest.mark.deep
def test_the_engine_really_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "has_cuda", lambda: False)
    rows = {row.metric: row.value for row in engine.run(Context(Remembered(), tmp_path, quick=True))}
    assert rows["engine.offline.tiny"] > 0
    assert rows["engine.decode.tiny.b4.ctx64"] > 0


# -- ports


def test_free_ports_are_different_and_have_free_neighbours() -> None:
    ports = free_ports(5, run=2) + free_ports(5, run=2)
    assert len({port + offset for port in ports for offset in range(2)}) == 20
