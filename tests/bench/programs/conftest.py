from pathlib import Path

import pytest
from tokenizers import Tokenizer
from treeline_bench.prompts import PromptMaker


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
def maker(tokenizer: Tokenizer) -> PromptMaker:
    return PromptMaker(tokenizer)
