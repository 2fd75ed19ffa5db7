"""Requests for vectors, read without a server: pairs as transformers renders them, and random bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pooling_models import RERANK_TEMPLATE, add_tokenizer
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import Answered, Caller, PoolingTask
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.pooling_reader import check_template
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_wire.tokenizer import TokenizerBundle

transformers = pytest.importorskip("transformers")

TEXTS = ["The capital of France is Paris.", "hello world", "one two three four five"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tokenizers, with and without a template for rerankers."""
    folder = tmp_path_factory.mktemp("t")
    made = {"plain": None, "template": RERANK_TEMPLATE}
    for name in made:
        (folder / name).mkdir()
    return {name: add_tokenizer(folder / name, template=template) for name, template in made.items()}


def reader_of(folder: Path, pooling: Pooling) -> Reader:
    return Reader("m", Prompts(TokenizerBundle.from_dir(folder)), SamplingDefaults(), pooling)


YES_NO = Pooling("score", answers=(40, 50), activation="sigmoid")
HEAD = Pooling("score", labels=("LABEL_0",), activation="sigmoid")
LIMITS = Limits(512, 512)


def pairs_of(reader: Reader, kind: Any, **body: Any) -> list[list[int]]:
    task = reader.read(kind, json.dumps(body).encode(), LIMITS, Caller())
    assert isinstance(task, PoolingTask)
    return [prompt.input_ids for prompt in task.prompts]


@pytest.mark.parametrize("instruct", [None, "Say yes or no."])
@pytest.mark.parametrize("pooling", [YES_NO, HEAD], ids=["yes or no", "head"])
def test_a_pair_is_rendered_by_a_template_that_knows_it(
    folders: dict[str, Path], pooling: Pooling, instruct: str | None
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["template"])
    reader = reader_of(folders["template"], pooling)
    check_template(pooling, reader.prompts)
    wanted = []
    for text in TEXTS:
        chat = [{"role": "query", "content": "the capital"}, {"role": "document", "content": text}]
        head = [] if instruct is None else [{"role": "system", "content": instruct}]
        asked = {"add_generation_prompt": bool(pooling.answers), "return_dict": True}
        wanted.append(tokenizer.apply_chat_template([*head, *chat], **asked)["input_ids"])
    assert pairs_of(reader, "rerank", query="the capital", documents=TEXTS, instruct=instruct) == wanted
    assert pairs_of(reader, "score", text_1="the capital", text_2=TEXTS, instruct=instruct) == wanted


def test_a_pair_without_a_template_is_joined_as_in_transformers(folders: dict[str, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["plain"])
    reader = reader_of(folders["plain"], HEAD)
    wanted = [tokenizer("the capital", text)["input_ids"] for text in TEXTS]
    assert pairs_of(reader, "rerank", query="the capital", documents=TEXTS) == wanted
    with pytest.raises(ValueError, match=r"needs a chat template .* for messages of the roles query and document"):
        check_template(YES_NO, reader.prompts)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 33) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "role", "content"]), inner),
    max_leaves=6,
)
MEMBERS = ("model", "input", "messages", "text_1", "text_2", "query", "documents", "top_n", "dimensions", "instruct")


@given(
    st.sampled_from(("embedding", "pooling", "classify", "score", "rerank")),
    st.dictionaries(st.sampled_from(MEMBERS), ANY),
)
@settings(deadline=None)
def test_any_body_is_read_or_refused(folders: dict[str, Path], kind: Any, body: dict[str, Any]) -> None:
    reader = _READERS.setdefault("one", reader_of(folders["plain"], HEAD))
    task, status = None, 200
    try:
        task = reader.read(kind, msgspec.json.encode(body), LIMITS, Caller())
    except ApiError as error:
        status = error.status
    assert status in ((400, 404) if task is None else (200,))
    if task is not None:
        assert not isinstance(task, Answered)
        requests = task.prompts
        assert all(0 < len(one.input_ids) <= 512 and one.sampling.max_new_tokens == 0 for one in requests)
        assert all(one.pools for one in requests)


_READERS: dict[str, Reader] = {}
"""Made once for all examples."""
