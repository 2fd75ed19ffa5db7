from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.media import Decoder, make_media_checkpoint


@pytest.fixture(scope="session")
def media_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_checkpoint(tmp_path_factory.mktemp("models") / "media")


@pytest.fixture(scope="module")
def decode(media_model: Path) -> Iterator[Decoder]:
    made = Decoder(media_model)
    yield made
    made.close()
