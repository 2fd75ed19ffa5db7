"""`treeline bench serving` as users run it, against scripted servers and one of ours."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.fake_openai import DONE, FakeOpenAI, serving, token, whole
from support.runtime_server import running
from treeline_bench import cli
from treeline_bench.results import read_result
from treeline_bench.serving import command
from treeline_bench.serving.output import command_of
from treeline_bench.serving.server import ServerError, normal_url

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny"
SMALL = ["--token-ids", "--num-prompts", "8", "--input-len", "6", "--output-len", "4", "--concurrency", "4"]


pytestmark = pytest.mark.usefixtures("signals")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def prompts_of(server: FakeOpenAI) -> list[list[int]]:
    """Return the prompts that the server got, without the warm-up, whose answer has 16 tokens."""
    return [body["prompt"] for body in server.bodies if body["max_tokens"] != 16]


def test_a_run_shows_tables_and_leaves_everything_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    with serving() as server:
        server.key = "secret-key"
        flags = [*SMALL, "--api-key", "secret-key", "--goodput", "ttft:20000", "--processes", "2"]
        status = cli.main(["serving", "--url", f"{server.url}/v1", *flags, "--output", str(out)])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "8 of 8 requests" in said.out
    assert "time to first token" in said.out
    assert "fake 7.1" in said.out
    assert "processes: 2, busy" in said.out
    document = json.loads(out.read_text())
    [measured] = document["servers"]
    [round_] = measured["rounds"]
    assert (measured["model"], measured["engine"], measured["version"]) == ("m", "fake", "7.1")
    assert (round_["completed"], round_["good"], round_["short"], round_["prompt_difference"]) == (8, 8, 0, 0)
    assert round_["output_tokens"] == sum(body["max_tokens"] for body in server.bodies) - 16
    assert round_["client"]["processes"] == 2
    assert measured["medians"]["ttft_ms.p99"] > 0
    assert document["workload"]["dataset"] == "random"
    assert document["machine"]["cores"] >= 1
    assert "secret-key" not in out.read_text() + said.out + said.err
    sent = server.bodies[0]
    assert sent["ignore_eos"] is True
    assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.deep
def test_two_servers_get_the_same_prompts_in_alternating_rounds_and_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []

    def noting(name: str) -> Any:
        def answer(body: dict[str, Any]) -> Iterator[bytes]:
            turns.append(name)
            return whole(body)

        return answer

    with serving(noting("a")) as ours, serving(noting("b")) as other:
        other.models = ["something-else"]
        flags = [*SMALL[:-1], "1", "--rounds", "2", "--seed", "5", "--results", str(tmp_path)]
        assert command.main(["--url", ours.url, "--against", f"vllm={other.url}", *flags]) == 0
        assert prompts_of(ours)[:8] == prompts_of(other)[:8]
        assert prompts_of(ours)[8:] == prompts_of(other)[8:]
        assert prompts_of(ours)[:8] != prompts_of(ours)[8:]  # a round finds nothing of the last one in the cache
        assert turns[2:] == ["a"] * 8 + ["b"] * 16 + ["a"] * 8
        assert {body["model"] for body in other.bodies} == {"something-else"}
        again = ["--url", ours.url, *flags[:-2]]
        before = len(prompts_of(ours))
        assert command.main(again) == 0
        assert prompts_of(ours)[before:] == prompts_of(ours)[:before]
    said = capsys.readouterr().out
    assert "ratio" in said
    assert "medians of 2 rounds" in said
    result = read_result(tmp_path / "serving-random.json")
    ours_row, theirs = (result.row(f"serving.output_tokens_s.{name}") for name in ("treeline", "vllm"))
    assert ours_row.reference == pytest.approx(theirs.value, rel=1e-5)
    assert result.value("serving.vs_vllm.random.throughput") > 0
    assert result.value("serving.vs_vllm.random.ttft_p90") > 0
    assert result.versions["vllm"] == "fake 7.1"
    assert str(tmp_path) not in (tmp_path / "serving-random.json").read_text()
    assert "serving.vs_vllm.random.throughput" in (tmp_path / "serving-random.md").read_text()
    assert ElementTree.parse(tmp_path / "serving-random.svg").getroot().tag.endswith("svg")


def no_usage(body: dict[str, Any]) -> Iterator[bytes]:
    yield token()
    yield DONE


def http(status: int, said: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(said), said)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (no_usage, "token counts would be guesses"),
        (lambda body: http(400, b"ignore_eos is unknown"), "--respect-eos"),
    ],
)
def test_a_server_that_cannot_be_measured_fails_at_the_first_request(
    answer: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answer) as server:
        assert command.main(["--url", server.url, *SMALL]) == 1
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""
    assert len(server.bodies) == 1


def test_a_missing_or_wrong_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert command.main(["--url", server.url, "--model", "nope", *SMALL]) == 1
        assert "serves no model 'nope'; it has: m" in capsys.readouterr().err
        assert command.main(["--url", server.url, *SMALL[1:]]) == 1  # text, but whose tokens?
        assert "--tokenizer" in capsys.readouterr().err
        assert command.main(["--url", server.url, *SMALL[1:], "--tokenizer", str(Path(__file__))]) == 1
        assert "no tokenizer in" in capsys.readouterr().err
        server.key = "k"
        assert command.main(["--url", server.url, *SMALL]) == 1
        assert "it wants an API key (401): --api-key" in capsys.readouterr().err
        assert command.main(["--url", server.url, "--api-key", "x", *SMALL]) == 1
        assert "not the right one" in capsys.readouterr().err
        server.key, server.models = "", []
        assert command.main(["--url", server.url, *SMALL]) == 1
        assert "--model NAME" in capsys.readouterr().err
    for url in (server.url, "http://a b:80"):
        assert command.main(["--url", url, *SMALL]) == 1
        assert "is the server started" in capsys.readouterr().err


def test_errors_under_load_are_counted_by_kind_and_the_rest_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def answer(body: dict[str, Any]) -> Any:
        asked.append(1)
        return http(503, b"queue full") if len(asked) in (3, 5) else whole(body)

    with serving(answer) as server:
        assert command.main(["--url", server.url, *SMALL]) == 0
    said = capsys.readouterr().out
    assert "6 of 8 requests" in said
    assert "2 × HTTP 503: queue full" in said


def test_a_server_that_dies_ends_the_run_with_partial_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        asked: list[int] = []

        def answer(body: dict[str, Any]) -> Iterator[bytes | None]:
            asked.append(1)
            if len(asked) < 30:
                yield from whole(body)
                return
            server.close()
            yield None

        server.answer = answer
        flags = [*SMALL, "--num-prompts", "5000", "--output", str(tmp_path / "run.json"), "--results", str(tmp_path)]
        assert command.main(["--url", server.url, *flags]) == 1
    said = capsys.readouterr()
    assert "gave up: " in said.out
    assert "connection lost" in said.out
    assert "the run is not whole" in " ".join(said.err.split())  # lines end at the width of the terminal
    [measured] = json.loads((tmp_path / "run.json").read_text())["servers"]
    assert 20 < measured["rounds"][0]["completed"] < 30
    assert not (tmp_path / "serving-random.json").exists()


DEAF = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("before", [[], ["-c", DEAF]], ids=["usual", "ignored and blocked by who started it"])
def test_ctrl_c_reports_partial_results(before: list[str], tmp_path: Path) -> None:
    enough = threading.Event()

    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        if len(server.bodies) <= 20:
            return whole(body)
        enough.set()
        return iter([token(), b""])

    out = tmp_path / "run.json"
    with serving() as server:
        server.answer = answer
        words = ["--url", server.url, *SMALL, "--num-prompts", "100", "--output", str(out)]
        process = subprocess.Popen(
            [sys.executable, *before, "-m", "treeline_bench.serving", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert enough.wait(60)
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert "interrupted: figures until then" in said
    assert "Traceback" not in errors
    document = json.loads(out.read_text())
    assert document["interrupted"] is True
    assert 10 < document["servers"][0]["rounds"][0]["completed"] <= 20


def test_a_load_that_runs_out_of_prompts_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert command.main(["--url", server.url, *SMALL, "--duration", "60"]) == 0
    assert "more of them by --num-prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--url"),
        (["--url", "x", "--request-rate", "3", "--concurrency", "3"], "two kinds of load"),
        (["--url", "x", "--chat", "--token-ids"], "/v1/completions alone"),
        (["--url", "x", "--turns", "3"], "--turns means nothing to the dataset random"),
        (["--url", "x", "--against", "y"], "NAME=URL"),
        (["--url", "x", "--against", "treeline=y"], "two servers are called treeline"),
        (["--url", "x", "--against", "a b=y"], "letters, digits"),
        (["--url", "x", "--goodput", "ttft"], "a colon and milliseconds"),
        (["--url", "x", "--concurrency", "0"], "a whole number from 1 on"),
        (["--url", "x", "--request-rate", "inf"], "a number above 0"),
        (["--url", "x", "--range-ratio", "2"], "a number from 0 to 1"),
        (["--url", "x", "--extra-body", "[]"], "a JSON object"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_words(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        command.main(words)
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


def test_help_teaches_every_dataset_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serving", "--help"], prog="treeline bench")
    said = capsys.readouterr().out
    assert "usage: treeline bench serving" in said
    assert "examples:" in said
    assert all(name in said for name in ("random:", "sharegpt:", "generated-shared-prefix", "multi-turn:"))


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://a:8/v1/", "http://a:8"),
        ("https://a/path/v1", "https://a/path"),
        ("a:80", "http://a:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_taken_as_people_write_them(url: str, normal: str) -> None:
    assert normal_url(url) == normal


@pytest.mark.parametrize(
    ("said", "urls"),
    [
        ("not a server's address", ["", "ftp://a", "http://", "http://a:x", "http://a:99999"]),
        # a result names its addresses
        (
            "an address has no user and password",
            ["https://me:secret@gpu7:8000/v1", "me:secret@gpu7", "http://secret@127.0.0.1:1"],
        ),
    ],
)
def test_an_invalid_address_or_one_with_a_password_is_refused(said: str, urls: list[str]) -> None:
    for url in urls:
        with pytest.raises(ServerError, match=said):
            normal_url(url)


def test_a_result_names_neither_keys_nor_hosts_nor_paths(tmp_path: Path) -> None:
    words = ["--url", "https://gpu7.example.org:8000/v1", "--against", "b=http://127.0.0.1:1", "--api-key", "k"]
    words += ["--tokenizer", str(tmp_path), "--output=x.json", "--seed", "3", "--api-key=k"]
    public = command_of(words, public=True)
    assert public == (
        "treeline bench serving --url https://SERVER:8000/v1 --against b=http://127.0.0.1:1 "
        f"--tokenizer {tmp_path.name} --seed 3"
    )
    assert "--output=x.json" in command_of(words, public=False)
    assert " k" not in command_of(words, public=False)


def test_flags_are_written_out_so_that_no_key_gets_into_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serving", "--url", "http://127.0.0.1:1", "--api-k", "secret"])
    assert end.value.code == 2
    assert "unrecognized arguments: --api-k" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--output", "--results"])
def test_an_unwritable_output_is_reported_before_the_load(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with serving() as server:
        assert cli.main(["serving", "--url", server.url, *SMALL, flag, str(file / "in")]) == 1
        assert cli.main(["serving", "--url", server.url, *SMALL, "--output", str(tmp_path)]) == 1
    assert server.bodies == []
    assert str(file) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.integration
@pytest.mark.deep
def test_our_own_server_is_measured_with_its_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    with running(MODEL, "--no-events") as server:
        shared = ["--dataset", "generated-shared-prefix", "--groups", "2", "--prompts-per-group", "3"]
        lengths = ["--prefix-len", "64", "--input-len", "8", "--output-len", "4", "--concurrency", "1"]
        assert command.main(["--url", server.url, *shared, *lengths, "--output", str(out)]) == 0
        first = json.loads(out.read_text())["servers"][0]["rounds"][0]
        talk = ["--dataset", "multi-turn", "--num-prompts", "2", "--turns", "2", "--input-len", "32"]
        assert command.main(["--url", server.url, *talk, "--output-len", "4", "--chat", "--output", str(out)]) == 0
        second = json.loads(out.read_text())["servers"][0]["rounds"][0]
    assert (first["completed"], first["short"], first["prompt_difference"]) == (6, 0, 0)
    assert first["prompt_tokens"] == 6 * 72
    assert first["output_tokens"] == 6 * 4
    assert first["cached_tokens"] == 4 * 64  # each prefix is computed once
    assert second["completed"] == 4
    assert second["cached_tokens"] >= 2 * 32  # the second turns find the first ones
    assert f"treeline {version('treeline-runtime')} tiny" in capsys.readouterr().out
