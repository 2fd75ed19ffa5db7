from __future__ import annotations

from pathlib import Path

import pytest
from support.runtime_engine import write_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that never ends a text by itself."""
    return write_config(tmp_path_factory.mktemp("tiny"))
