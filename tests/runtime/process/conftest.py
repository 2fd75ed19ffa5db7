from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runtime_server import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture
def temp() -> Iterator[Path]:
    """A folder for temporary files with a path short enough for sockets; it must be empty in the end."""
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:
        yield Path(name)
