"""The download in a pod: requests to the Hub, files on disk, progress and final messages."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from treeline_runtime.fetch.__main__ import main, wanted
from treeline_runtime.fetch.folder import MARKER, Progress, fetch
from treeline_runtime.kvcache.page import format_of

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000}


class Hub:
    """Stands in for `snapshot_download`: `files` are the repository's."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = FILES if files is None else files
        self.asked: list[dict[str, Any]] = []
        self.downloads = 0
        self.commit = "c0ffee"
        self.during: Callable[[], None] = lambda: None
        self.error: Exception | None = None

    def __call__(self, repo: str, *, dry_run: bool = False, **options: Any) -> Any:
        self.asked.append({"repo": repo, "dry_run": dry_run, **options})
        if self.error is not None:
            raise self.error
        if dry_run:
            return [
                SimpleNamespace(filename=name, file_size=len(data), commit_hash=self.commit)
                for name, data in self.files.items()
            ]
        self.downloads += 1
        folder = Path(options["local_dir"])
        (folder / ".cache").mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
            self.during()
        return str(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def run(to: Path, *more: str, uri: str = "hf://org/name@v1") -> int:
    log = str(to.parent / "termination-log")
    return main(["--uri", uri, "--to", str(to), "--termination-log", log, *more])


def test_a_model_is_downloaded_once_and_found_by_the_next_pod(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "org--name@v1"
    assert run(to) == 0
    assert (to / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert json.loads((to / MARKER).read_text())["commit"] == "c0ffee"
    assert not (to / ".cache").exists()
    assert not (tmp_path / "org--name@v1.partial").exists()
    first, second = hub.asked
    assert (first["repo"], first["revision"], first["dry_run"]) == ("org/name", "v1", True)
    assert second["revision"] == "c0ffee"  # the same files that were looked at
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    commits = {"hf://org/name@v1": "c0ffee"}
    assert lines[0] == {"bytes_done": 0, "bytes_total": 5002, "commits": commits}
    assert lines[-1] == {"bytes_done": 5002, "bytes_total": 5002, "commits": commits}

    hub.error = RuntimeError("nobody may ask")
    assert run(to) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bytes_done"] == last["bytes_total"]


def test_a_download_is_reported_with_its_commit(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--tokenizer-uri", "hf://org/words", "--tokenizer-to", str(tmp_path / "words")]
    for _ in range(2):  # also by a pod that finds it complete
        assert run(tmp_path / "m", *more, uri="hf://org/name") == 0
        assert (tmp_path / "termination-log").read_text() == "hf://org/name c0ffee\nhf://org/words c0ffee"
        told = [json.loads(line).get("commits") for line in capsys.readouterr().out.splitlines()]
        assert told[0] == {"hf://org/name": "c0ffee"}, "before anything is there"
        assert told[-1] == {"hf://org/name": "c0ffee", "hf://org/words": "c0ffee"}


def test_a_download_takes_the_commit_that_other_pods_have(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREELINE_COMMITS", f"hf://org/other {'b' * 40}\nhf://org/name {'a' * 40}")
    assert run(tmp_path / "m", uri="hf://org/name") == 0
    assert [asked["revision"] for asked in hub.asked] == ["a" * 40, "c0ffee"]
    assert run(tmp_path / "n", uri="hf://org/name@main") == 0
    assert hub.asked[2]["revision"] == "main", "of which nothing is said"
    assert run(tmp_path / "m", uri="hf://org/name") == 0
    assert hub.downloads == 2, "a complete folder is that of the URI, as before"


def test_progress_grows_and_counts_all_folders(hub: Hub, tmp_path: Path) -> None:
    out = io.StringIO()
    progress = Progress(out)
    seen = threading.Event()
    hub.during = lambda: (seen.wait(0.05), None)[1]
    for name in ("one", "two"):
        fetch(wanted("hf://org/" + name, str(tmp_path / name)), progress, every_s=0.01)
    states = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (states[-1]["bytes_done"], states[-1]["bytes_total"]) == (10004, 10004)
    done = [state["bytes_done"] for state in states]
    assert done == sorted(done)
    assert len(set(done)) > 2


def test_pods_that_share_a_volume_download_once(hub: Hub, tmp_path: Path) -> None:
    began, go = threading.Event(), threading.Event()

    def during() -> None:
        began.set()
        assert go.wait(60)

    hub.during = during
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(run(tmp_path / "m"))) for _ in range(2)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert results == [0, 0]
    assert hub.downloads == 1


def test_another_revision_in_the_same_folder_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    assert run(tmp_path / "m") == 0
    assert run(tmp_path / "m", uri="hf://org/name@v2") == 0
    assert hub.downloads == 2
    assert json.loads((tmp_path / "m" / MARKER).read_text())["revision"] == "v2"


def test_pods_that_downloaded_the_same_weights_give_each_other_pages(hub: Hub, tmp_path: Path) -> None:
    def fingerprint(name: str) -> bytes:
        assert run(tmp_path / name) == 0
        shape = {"num_layers": 1, "page_size": 1, "num_kv_heads": 1, "head_dim": 1, "element_bytes": 2}
        return format_of(tmp_path / name, **shape).fingerprint

    assert fingerprint("one") == fingerprint("two")
    hub.commit = "decaf"
    assert fingerprint("newer") != fingerprint("one")


def test_files_of_another_user_are_taken_though_their_times_cannot_be_set(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert run(tmp_path / "m") == 0


def test_an_incomplete_folder_is_completed(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "m" / MARKER).write_text("{")
    assert run(tmp_path / "m") == 0
    assert (tmp_path / "m" / "model.safetensors").stat().st_size == 5000


def test_the_tokenizer_alone_comes_without_weights(hub: Hub, tmp_path: Path) -> None:
    more = ["--tokenizer-uri", "hf://org/words", "--tokenizer-to", str(tmp_path / "words")]
    assert run(tmp_path / "m", *more) == 0
    assert "*.safetensors" in hub.asked[0]["allow_patterns"]
    assert "*.safetensors" not in hub.asked[-1]["allow_patterns"]


def _error(kind: type[Exception], status: int | None = None) -> Exception:
    made = kind.__new__(kind)  # these classes want a response to be constructed
    made.args = ("no\nmore",)
    if status is not None:
        made.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return made


def _while_looking(cause: Exception) -> Exception:
    made = errors.DryRunError("cannot look")
    made.__cause__ = cause
    return made


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (_while_looking(_error(errors.GatedRepoError, 401)), "DownloadFailed: 401 org/name is gated: accept"),
        (_error(errors.RepositoryNotFoundError, 404), "DownloadFailed: 404 org/name is not on the Hub"),
        (_error(errors.RevisionNotFoundError), "DownloadFailed: org/name has no revision 'v1'"),
        (
            _while_looking(RuntimeError("no route")),
            "DownloadFailed: org/name could not be downloaded: RuntimeError: no",
        ),
        (OSError(28, "No space left on device"), "DownloadFailed: cannot write"),
    ],
)
def test_a_failure_ends_with_one_line_and_its_reason(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    hub.error = error
    assert run(tmp_path / "m") == 1
    said = (tmp_path / "termination-log").read_text()
    assert said.startswith(line)
    assert "\n" not in said
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_model_that_does_not_fit_is_refused_before_the_download(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20, total=1 << 30))
    assert run(tmp_path / "m") == 1
    assert (tmp_path / "termination-log").read_text().startswith("ModelTooLarge: needs 0.0 GiB, 0.0 GiB free in")
    assert hub.downloads == 0


def test_a_repository_without_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert run(tmp_path / "m") == 1
    assert (tmp_path / "termination-log").read_text().startswith("WeightsMissing: org/name has no *.safetensors")


def test_a_repository_may_not_use_our_file_names(hub: Hub, tmp_path: Path) -> None:
    hub.files = FILES | {".treeline-complete/config.json": b"{}"}
    assert run(tmp_path / "m") == 1
    assert hub.downloads == 0
    assert "a name that no model needs, '.treeline-complete/" in (tmp_path / "termination-log").read_text()


def test_an_incomplete_download_is_a_failure(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(repo: str, *, dry_run: bool = False, **options: Any) -> Any:
        if dry_run:
            return hub(repo, dry_run=True, **options)
        hub.files = {"config.json": b"{}"}
        return hub(repo, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", short)
    assert run(tmp_path / "m") == 1
    assert "2 of 5002 bytes arrived" in (tmp_path / "termination-log").read_text()
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("uri", ["org/name", "hf://name", "hf://org/name/more", "az://org/name"])
def test_a_source_that_is_no_hub_model_is_reported(uri: str, tmp_path: Path) -> None:
    assert run(tmp_path / "m", uri=uri) == 1
    assert "is not a Hub model" in (tmp_path / "termination-log").read_text()
