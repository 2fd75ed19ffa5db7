"""One server of the tiny model, and one backend, for all modules that ask a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runtime_server import running
from treeline_lang import RuntimeEndpoint


@pytest.fixture(scope="session")
def tiny_url() -> Iterator[str]:
    with running(Path(__file__).parents[2] / "models" / "tiny", "--no-events") as server:
        yield server.url


@pytest.fixture(scope="session")
def backend(tiny_url: str) -> Iterator[RuntimeEndpoint]:
    with RuntimeEndpoint(tiny_url) as endpoint:
        yield endpoint
