from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from support.runtime_server import ServerProcess, make_checkpoint, running
from support.speaking import make_speaking_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def fake(model: Path) -> Iterator[ServerProcess]:
    """A server whose scheduler has no model: it repeats the prompt (support.fake_scheduler)."""
    with running(model, "--enable-debug-endpoints", "--kv-events-topic", "kv@test", fake=True) as server:
        yield server


@pytest.fixture(scope="session")
def keyed(model: Path) -> Iterator[ServerProcess]:
    """Another server, with a key and a name for its model."""
    flags = ("--api-key=correct-horse", "--no-events", "--served-model-name=mine")
    with running(model, *flags, fake=True) as server:
        yield server


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the model `speaks`: it repeats the last message (support.speaking)."""
    folder = make_speaking_checkpoint(tmp_path_factory.mktemp("models") / "speaks")
    with running(folder, "--no-events", fake=True, environment={"FAKE_TOKEN_S": "0.001"}) as server:
        yield server


@pytest.fixture(scope="module")
def server(fake: ServerProcess) -> ServerProcess:
    """The server that the clients below use: a module may define another one of this name."""
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


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client
