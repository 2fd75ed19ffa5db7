"""`routing-sim --peers`: other routers over simulated engines behind sockets; here one that forwards by round robin."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Remembered
from support.stub_router import install
from treeline_bench import cli
from treeline_bench.context import BenchmarkError, Context
from treeline_bench.peers import benchmark, script
from treeline_bench.peers.benchmark import Played, played_of, rows_of
from treeline_bench.peers.routers import PEERS
from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.messages import Record
from treeline_sim.routers import TraceRequest
from treeline_sim.traces.base import Draw, Trace

MS = 1_000_000
SMG = PEERS["smg"]


def two_prefixes(draw: Draw) -> Iterator[TraceRequest]:
    prefixes = [draw.text(256) for _ in range(2)]
    for at in draw.arrivals():
        yield draw.request(at, draw.rng.choice(prefixes).extended(64, draw.rng), 8)


TRACE = Trace("zipf", "two prefixes of 256, 64 own, 8 out", rate=80.0, requests=400, generate=two_prefixes)


def record(due_ms: float, first_ms: float, cached: int = 50, late_ms: float = 0.0, error: str = "") -> Record:
    due, begun, first = (int(ms * MS) for ms in (due_ms, due_ms + late_ms, first_ms))
    tokens = [] if error else [first, first + MS]
    return Record(0, 0, 100, 2, due, begun, begun, first, tokens, 0 if error else 100, 2, cached, error)


def test_times_count_from_when_a_request_was_due_and_failed_ones_are_errors() -> None:
    records = [
        record(0, 10, cached=0),
        record(5, 25, late_ms=21),
        record(9, 39, late_ms=19),
        record(9, 0, error="gone"),
    ]
    assert played_of("a", records) == Played("a", 100 / 300, 20.0, 28.0, errors=1, late=1)


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([record(0, 0, error="HTTP 503")], "a answered none of 1 requests: HTTP 503"),
        ([record(0, 1, cached=-1)], "a prompt of 100 tokens came back as 100 tokens, -1 of them cached"),
    ],
)
def test_a_run_that_says_nothing_fails(records: list[Record], complaint: str) -> None:
    with pytest.raises(BenchmarkError, match=complaint):
        played_of("a", records)


def test_ours_is_compared_with_each_peer() -> None:
    mine = Played("treeline", 0.8, 5.0, 20.0, 0, 1)
    others = [Played("smg", 0.4, 10.0, 40.0, 2, 0), Played("sglang-router", 0.0, 10.0, 16.0, 0, 0)]
    rows = {row.metric.removeprefix("routing.peers.zipf."): row for row in rows_of("zipf", mine, others, endless=0.9)}
    assert rows["hit_vs.smg"].value == 2.0
    assert rows["ttft_p90_vs.smg"].value == 0.5
    assert rows["ttft_p90_vs.sglang-router"].value == 1.25
    assert "hit_vs.sglang-router" not in rows
    assert rows["hit_rate.treeline"].reference == 0.9
    assert (rows["errors.smg"].value, rows["late.treeline"].value) == (2, 1)


def test_a_trace_is_slowed_to_the_machine_and_keeps_its_shared_prefixes(model: Path) -> None:
    maker = PromptMaker.of_model(model)
    at_rate = script.script_of(TRACE, 3, 1.0, maker)
    assert at_rate.speed == 1.0
    slow = script.script_of(replace(TRACE, rate=800.0), 3, 1.0, maker)
    assert 0.1 < slow.speed < 0.3, "300 requests of 320 tokens a second, where 20,000 tokens a second are borne"
    assert len(at_rate.moments) == pytest.approx(30, abs=15)
    assert slow.moments == sorted(slow.moments)
    assert 0.9 < slow.moments[-1] < 1.0
    asked = [conversation.turns[0] for conversation in slow.conversations]
    assert {(turn.piece_tokens, turn.output_tokens) for turn in asked} == {(320, 8)}
    assert len({" ".join(str(turn.piece).split()[:256]) for turn in asked}) == 2
    assert len({turn.piece for turn in asked}) == len(asked)
    hits = (len(asked) - 2) * 256 / (len(asked) * 320)
    assert slow.endless_hit_rate == pytest.approx(hits)


def test_a_missing_or_wrong_peer_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    assert SMG.find({"smg": install(tmp_path, "smg", SMG.version)}) == tmp_path / "smg"
    with pytest.raises(BenchmarkError, match=rf"smg is 0\.3\.2 and not {SMG.version}: .*pip install smg=="):
        SMG.find({"smg": install(tmp_path, "other", "0.3.2")})
    with pytest.raises(BenchmarkError, match="smg does not start"):
        SMG.find({"smg": tmp_path / "nowhere"})


def test_without_any_peer_there_is_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["routing-sim", "--peers", "smg", "--out", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"left out: smg is not installed: python -m venv DIR && DIR/bin/pip install smg=={SMG.version}" in said
    assert "no peer to compare with" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--peers", "smg"], "--peers belongs to routing-sim alone"),
        (["tree", "--peers", "smg"], "--peers belongs to routing-sim alone"),
        (["routing-sim", "--peers", "nginx"], "unknown peer 'nginx'; there are: smg, sglang-router"),
        (["routing-sim", "--peers", "smg", "--peer-path", "smg"], "write P=PROGRAM"),
        (["routing-sim", "--peers", "smg", "--peer-trace", "x"], "unknown trace 'x'"),
        (["routing-sim", "--peer-trace", "zipf"], "need --peers"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(words)
    assert ending.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.deep
def test_our_picker_and_a_peer_serve_a_trace_from_engines_of_their_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "QUICK_SECONDS", 1.0)
    peers = {"smg": install(tmp_path, "smg", SMG.version)}
    display = Remembered()
    rows = benchmark.benchmark(peers, TRACE).run(Context(display, tmp_path, quick=True, model=model))
    found = {row.metric.removeprefix("routing.peers.zipf."): row for row in rows}
    for name in ("treeline", "smg"):
        assert found[f"errors.{name}"].value == 0
        assert 0 < found[f"ttft_p50_ms.{name}"].value <= found[f"ttft_p90_ms.{name}"].value
        rate = found[f"hit_rate.{name}"]
        assert rate.reference is not None
        assert 0.3 < rate.value < float(rate.reference) + 1e-5, (
            "new engines hit what they computed themselves, and no more"
        )
    by_hits = found["hit_rate.treeline"].value / found["hit_rate.smg"].value
    assert found["hit_vs.smg"].value == pytest.approx(by_hits, rel=1e-4)
    assert any(phase.startswith("smg: ") for phase in display.phases)
