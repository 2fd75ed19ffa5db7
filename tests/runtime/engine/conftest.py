"""Checkpoints for engines of several ranks, whose processes are forked and end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import forked_ranks
from support.runtime_server import eventually, make_checkpoint
from treeline_runtime.scheduler.ranks import group as group_module


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return make_checkpoint(folder / "a", seed=1), make_checkpoint(folder / "b", seed=2)


@pytest.fixture(scope="module")
def ranks_are_forked() -> Iterator[None]:
    """Those of an `Engine`. A server starts its own as it always does."""
    forked_ranks.prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "spawn", forked_ranks.Forked)
        yield


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield
        eventually(lambda: not forked_ranks.processes(), what="the ranks' processes end")
        eventually(lambda: not list(Path(folder).glob("treeline-*")), what="the folders of sockets are removed")
