from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.runtime_engine import write_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that never ends a text by itself."""
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Sockets of engines that give each other pages, and of their peers."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()
