"""The usage log: a line for each request, whatever the disk does, and never a word of a prompt."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_io import data_plane, engines, running_picker, until
from support.epp_kube import asked
from support.proxy import NONE, Proxy
from treeline_epp.main import main
from treeline_epp.requests.exchange import Exchange
from treeline_epp.usage_log import FileSink, UsageLog
from treeline_wire import headers as names


class Memory:
    """A sink that keeps everything; `gate` holds up writes while it is not set, `error` fails them."""

    def __init__(self) -> None:
        self.data = b""
        self.reopened = 0
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.error: OSError | None = None

    def write(self, data: bytes) -> None:
        self.writing.set()
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.data += data

    def reopen(self) -> None:
        self.reopened += 1

    def close(self) -> None:
        self.data += b"closed"


async def lines(*steps: Any) -> list[dict[str, Any]]:
    """What is written of requests that go this way."""
    sink = Memory()
    log = UsageLog(sink)
    log.start()
    proxy = Proxy([log])
    for step in steps:
        step(proxy)
    await log.stop()
    assert sink.data.endswith(b"closed")
    return [json.loads(line) for line in sink.data.removesuffix(b"closed").splitlines()]


async def test_a_request_is_a_line_with_all_that_is_known() -> None:
    (line,) = await lines(lambda proxy: proxy.stream(headers={names.CLIENT: "acme", names.FAIRNESS_ID: "batch"}))
    assert line.pop("time").endswith("+00:00")
    assert line.pop("endpoint") in ("e0", "e1")
    assert line == {
        "request_id": "r1",
        "client": "acme",
        "flow": "batch",
        "path": "/v1/chat/completions",
        "model": "tiny",
        "target": "tiny",
        "pool": "default",
        "served_by": None,
        "status": 200,
        "code": None,
        "prompt_tokens": 200,
        "cached_tokens": 64,
        "output_tokens": 11,
        "duration_s": 1.5,
    }


async def test_what_is_not_known_is_null_and_what_is_only_shown_has_no_line() -> None:
    def refused(proxy: Proxy) -> None:
        proxy.open(model="nobody-serves-this")
        proxy.close()

    def left(proxy: Proxy) -> None:
        proxy.open()
        proxy.close()

    def not_shown(proxy: Proxy) -> None:
        proxy.open(response=NONE)
        proxy.answer(**{names.PROMPT_TOKENS: "300", names.CACHED_TOKENS: "16"})
        proxy.close()

    def observed(proxy: Proxy) -> None:
        proxy.open(observed=True)
        proxy.close()

    first, second, third = await lines(refused, left, not_shown, observed)
    assert (first["status"], first["code"], first["endpoint"], first["model"]) == (404, "model_not_found", None, "")
    assert (second["status"], second["prompt_tokens"], second["duration_s"]) == (None, None, None)
    assert (third["status"], third["prompt_tokens"], third["cached_tokens"]) == (200, 300, 16)
    assert (third["output_tokens"], third["duration_s"]) == (None, None)


async def test_no_word_of_a_prompt_or_an_answer_is_in_a_line() -> None:
    (line,) = await lines(lambda proxy: proxy.stream(headers={"authorization": "Bearer sk-secret"}))
    text = json.dumps(line)
    assert not any(word in text for word in ("capital", "France", "Pa", "secret"))


async def test_what_clients_send_cannot_make_lines_of_its_own_nor_long_ones() -> None:
    evil = 'x"}\n{"status": 200'
    (line,) = await lines(lambda proxy: proxy.stream(headers={names.FAIRNESS_ID: evil, names.CLIENT: "c" * 5000}))
    assert (line["flow"], line["client"]) == (evil, "c" * 256)


async def test_a_writer_that_is_held_up_costs_lines_and_never_time() -> None:
    sink = Memory()
    sink.gate.clear()
    log = UsageLog(sink, most_bytes=2000)
    log.start()
    proxy = Proxy([log])
    proxy.stream()
    await asyncio.to_thread(sink.writing.wait, 10)
    for _ in range(20):
        proxy.stream()
    assert 10 < log.dropped < 20
    sink.gate.set()
    await log.stop()
    counts = {sample[3]["result"]: sample[4] for sample in log.samples()}
    assert counts == {"written": 21 - log.dropped, "failed": 0, "dropped": log.dropped}


async def test_it_is_opened_anew_before_the_next_line() -> None:
    sink = Memory()
    log = UsageLog(sink)
    log.start()
    log.reopen()
    await until(lambda: sink.reopened == 1, "without a line to write, too")
    Proxy([log]).stream()
    await log.stop()
    assert (sink.reopened, log.written) == (1, 1)


async def test_a_full_disk_is_told_once_counted_and_gone_on_from(caplog: pytest.LogCaptureFixture) -> None:
    sink = Memory()
    sink.error = OSError(28, "No space left on device")
    log = UsageLog(sink)
    log.start()
    proxy = Proxy([log])
    for count in (1, 2):
        proxy.stream()
        await until(lambda count=count: log.failed == count, "the line is lost")
    sink.error = None
    proxy.stream()
    await log.stop()
    assert (log.written, log.failed) == (1, 2)
    assert caplog.text.count("No space left on device") == 1


def test_a_file_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    sink = FileSink(path, 10_000, 2)
    sink.write(b'{"a": 2}\n')
    sink.close()
    assert path.read_bytes() == b'{"a": 1}\n{"a": \n{"a": 2}\n'
    FileSink(tmp_path / "new", 10_000, 2).close()
    assert (tmp_path / "new").stat().st_mode & 0o007 == 0, "not for everybody's eyes"


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 4), st.integers(20, 100))
def test_rotated_files_hold_the_newest_lines_in_order_and_no_more_than_asked(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], files: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("usage")
    sink = FileSink(folder / "u", most, files)
    written = [b"%d" % (at % 10) * size + b"\n" for at, size in enumerate(sizes)]
    for line in written:
        sink.write(line)
    sink.close()
    found = sorted(folder.iterdir(), key=lambda path: -int(path.suffix[1:] or 0))
    assert len(found) <= files + 1
    content = b"".join(path.read_bytes() for path in found)
    assert b"".join(written).endswith(content)
    assert all(path.stat().st_size <= max(most, 61) for path in found)
    if len(found) <= files:
        assert content == b"".join(written), "nothing had to go"


def test_several_processes_may_write_to_one_file_and_others_may_move_it(tmp_path: Path) -> None:
    path = tmp_path / "u"
    sinks = [FileSink(path, 200, 50) for _ in range(3)]
    lines = [b"%03d %d\n" % (at, at % 3) for at in range(150)]
    for at, line in enumerate(lines):
        sinks[at % 3].write(line)
        if at == 70:
            path.rename(tmp_path / "u.moved")
    for sink in sinks:
        sink.close()
    found = [file.read_bytes() for file in tmp_path.iterdir()]
    assert sorted(b"".join(found).splitlines(keepends=True)) == lines, "none is lost, none is there twice"
    assert all(len(content) <= 200 for content in found)
    assert len(found) <= len(b"".join(lines)) // 200 + 3, "and none is rotated before it is full"


def test_one_that_cannot_rotate_does_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage"
    mine, other = FileSink(path, 10, 2), FileSink(path, 10, 2)
    mine.write(b"123456789\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=PermissionError("read-only")))
        with pytest.raises(PermissionError):
            mine.write(b"second\n")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other.write(b"third\n")
    mine.write(b"4\n")
    assert path.read_bytes() == b"third\n4\n"
    mine.close()
    other.close()


async def test_a_picker_writes_it_and_opens_it_anew_on_sighup(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    async with engines(1) as (engine,):
        flags = ("--endpoint", f"e0={engine.address}", "--usage-log", str(path))
        async with running_picker(*flags) as picker:
            await asked(picker, "tiny")
            await until(path.read_bytes, "the line is written")
            path.rename(tmp_path / "moved")
            os.kill(os.getpid(), signal.SIGHUP)
            await until(path.exists, "the file is opened anew")
            await asked(picker, "tiny")
            await asked(picker, "nobody-serves-this")
            metrics = await picker.metrics()
        assert metrics['treeline_epp_usage_lines_total{result="dropped"}'] == 0
    assert [json.loads(line)["model"] for line in path.read_text().splitlines()] == ["tiny", ""]
    assert len((tmp_path / "moved").read_text().splitlines()) == 1


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "NONE"])
async def test_behind_a_real_envoy_it_has_what_that_shows(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "usage.jsonl"
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    flags = ("--usage-log", str(path), "--metrics-families", "treeline,gie")
    settings = {"request_body_mode": mode if mode != "NONE" else "BUFFERED", "response_body_mode": mode}
    async with engines(1) as fakes:
        fakes[0].reply_body = json.dumps({"choices": [], "usage": usage}).encode()
        async with data_plane(tmp_path, fakes, *flags, fail_open=False, **settings) as plane:
            assert (await plane.complete()).json()["usage"] == usage
            await until(lambda: path.read_bytes().endswith(b"\n"), "the line is written")
            metrics = await plane.picker.metrics()
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    shown = mode != "NONE"
    assert (line["status"], line["served_by"], line["model"]) == (200, fakes[0].address, "tiny")
    tokens = [line[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    assert tokens == ([9, 8, 4] if shown else [None] * 3)
    assert (line["duration_s"] is not None) == shown
    counted = {name for name in metrics if name.startswith("inference_objective_output_tokens_count")}
    assert bool(counted) == shown


def test_standard_output_has_lines_and_the_log_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with engines(1) as (engine,):
            flags = ("--endpoint", f"e0={engine.address}", "--usage-log", "-")
            async with running_picker(*flags) as picker:
                await asked(picker, "tiny")

    asyncio.run(run())
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["model"] == "tiny"


def test_a_file_that_cannot_be_opened_is_an_error_that_names_its_flag(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--endpoint", "a=127.0.0.1:1", "--usage-log", str(tmp_path / "no" / "file")]) == 1
    assert "--usage-log" in capfd.readouterr().err


def test_an_exchange_that_was_never_answered_has_no_usage() -> None:
    exchange = Exchange("r", "/", None, "", 0, 0.0)
    assert (exchange.usage.prompt, exchange.ttft_s, exchange.duration_s) == (None, None, None)
