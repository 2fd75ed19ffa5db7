from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runtime_server import ServerProcess, eventually, make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture
def temp() -> Iterator[Path]:
    """A folder for temporary files with a path short enough for sockets; it must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def start(model: Path, temp: Path) -> Iterator[Any]:
    """Start fake servers; at the end none of them may have left a process or a file."""
    started: list[ServerProcess] = []

    def start(*flags: str, **environment: str) -> ServerProcess:
        server = ServerProcess(model, *flags, fake=True, environment={"TMPDIR": str(temp), **environment})
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
    eventually(lambda: not list(temp.iterdir()), 60, "the socket folder is removed")
