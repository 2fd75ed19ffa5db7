from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.runtime_server import ServerProcess, make_checkpoint, running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="module")
def fake(model: Path) -> Iterator[ServerProcess]:
    """A server whose scheduler has no model: it repeats the prompt (support.fake_scheduler)."""
    with running(model, "--enable-debug-endpoints", "--kv-events-topic", "kv@test", fake=True) as server:
        yield server


@pytest.fixture(scope="module")
def server(fake: ServerProcess) -> ServerProcess:
    """Whom the clients below ask: a module may have another one of this name."""
    return fake


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def admin(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.admin() as client:
        yield client


@pytest.fixture(scope="module")
def metrics(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.metrics() as client:
        yield client
