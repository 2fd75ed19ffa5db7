import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bench import model_folder
from tokenizers import Tokenizer
from treeline_bench.prompts import PromptMaker


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
def maker(model: Path) -> PromptMaker:
    return PromptMaker.of_model(model)


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the signal handlers that a command replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
