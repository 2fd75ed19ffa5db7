"""The container beside a runtime, with a runtime that waits, refuses, or breaks off."""

from __future__ import annotations

import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from support.fake_hub import FakeHub, FakeRepo, running_hub
from support.runtime_server import eventually
from treeline_runtime.fetch import adapters
from treeline_runtime.fetch.adapters import AdapterError, Engine, Keeper
from treeline_wire.live_adapters import AdapterWish, version_name, wishes_text


def wish(name: str, uri: str = "pvc://sets/a", digest: str = "") -> AdapterWish:
    return AdapterWish(version_name(name, uri, digest), uri, digest)


class FakeEngine:
    """Loads all but what is in `refused`; an unload waits until it may end."""

    def __init__(self) -> None:
        self.there: dict[str, str] = {}
        self.refused: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.idle = threading.Event()

    def loaded(self) -> dict[str, str]:
        return dict(self.there)

    def load(self, wish: AdapterWish, path: str) -> None:
        self.asked.append((wish.name, path))
        if wish.name in self.refused:
            raise AdapterError("it has rank 128")
        self.there[wish.name] = "d" * 64

    def unload(self, name: str) -> None:
        assert self.idle.wait(60.0)
        del self.there[name]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.idle.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(engine: FakeEngine, clock: Clock, tmp_path: Path) -> Keeper:
    return Keeper(engine, tmp_path, clock)  # type: ignore[arg-type]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), b"x" * 100)
    others = dict.fromkeys(("model.safetensors", "tokenizer.json", "run.py", "old/adapter_model.safetensors"), b"y")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40, total=1 << 40))
    with running_hub(sql=FakeRepo(files | others)) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found


def test_unloads_that_wait_for_requests_keep_no_load_waiting(keeper: Keeper, engine: FakeEngine) -> None:
    engine.there = {wish(f"old-{number}").name: "d" * 64 for number in range(20)}
    new = wish("new")
    eventually(lambda: new.name in keeper.step(wishes_text([new])).loaded, what="the new adapter")
    engine.idle.set()
    eventually(lambda: engine.there.keys() == {new.name} or keeper.step(wishes_text([new])) is None)


def test_what_cannot_be_read_again_is_loaded_again_or_unloaded(keeper: Keeper, engine: FakeEngine) -> None:
    wished, left = wish("wished"), wish("left")
    engine.there = {wished.name: "", left.name: ""}
    engine.idle.set()
    eventually(lambda: wished.name in keeper.step(wishes_text([wished])).loaded, what="the wished one")
    eventually(lambda: engine.there.keys() == {wished.name} or keeper.step(wishes_text([wished])) is None)


def test_what_fails_again_and_again_is_tried_less_and_less_often(
    keeper: Keeper, engine: FakeEngine, clock: Clock
) -> None:
    bad = wish("bad")
    engine.refused = {bad.name}
    while clock.now < 3600.0:
        keeper.step(wishes_text([bad]))
        eventually(lambda: all(future.done() for future in keeper._busy.values()))
        clock.now += 10.0
    assert 10 <= len(engine.asked) <= 20, "each try may be a download of gigabytes"
    engine.refused = set()
    clock.now += 300.0
    eventually(lambda: bad.name in keeper.step(wishes_text([bad])).loaded, what="it, once it is mended")


@pytest.mark.usefixtures("hub")
def test_only_an_adapters_files_are_downloaded_and_those_of_nobody_removed(
    keeper: Keeper, engine: FakeEngine, tmp_path: Path
) -> None:
    sql = wish("sql", "hf://org/sql")
    for name in ("0123456789abcdef", "fedcba9876543210.partial"):
        (tmp_path / "fetched" / name).mkdir(parents=True)
        (tmp_path / "fetched" / name / "adapter_model.safetensors").write_bytes(b"x")
    (tmp_path / "fetched/0123456789abcdef.lock").touch()
    eventually(lambda: sql.name in keeper.step(wishes_text([sql])).loaded, what="the adapter")
    ((_, path),) = engine.asked
    assert {one.relative_to(tmp_path / path).as_posix() for one in (tmp_path / path).rglob("*.*")} == {
        *("adapter_config.json", "adapter_model.safetensors", ".treeline-complete")
    }
    assert {one.name.partition(".")[0] for one in (tmp_path / "fetched").iterdir()} == {Path(path).name}
    engine.idle.set()
    eventually(lambda: keeper.step("[]") is None or not [*(tmp_path / "fetched").iterdir()], what="the files to go")


def test_a_disk_that_would_be_nearly_full_is_left_alone(
    keeper: Keeper, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=149 << 30, total=1000 << 30))
    sql = wish("sql", "hf://org/sql")
    report = eventually(lambda: (said := keeper.step(wishes_text([sql]))).errors and said)
    assert report.errors[sql.name].startswith("needs 0.0 GiB, 0.0 GiB free in")


def test_an_answer_that_breaks_off_is_an_error_of_the_runtime(tmp_path: Path) -> None:
    class Broken(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"data": [')

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert "does not answer" in Keeper(Engine(url, url), tmp_path).step("[]").errors[""]
        server.shutdown()


def test_a_report_is_repeated_for_logs_lose_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 1190.0:
            raise KeyboardInterrupt

    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(adapters.signal, "signal", lambda *_: None)
    (tmp_path / "wishes").write_text("no json")
    flags = [f"--wishes={tmp_path / 'wishes'}", f"--root={tmp_path}", "--port=9", "--admin-port=9"]
    monkeypatch.setattr(sys, "argv", ["adapters", *flags])
    with pytest.raises(KeyboardInterrupt):
        adapters.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert len(set(lines)) == 1
