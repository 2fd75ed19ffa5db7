"""Many and large texts for vectors: the event loop stays free, no answer is 500."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cpu import reference_s
from support.loop_watch import Holds
from support.pooling_models import RERANK_TEMPLATE, add_logit_score, add_tokenizer, configured
from support.runtime_server import ServerProcess, running

pytestmark = [pytest.mark.integration, pytest.mark.deep]

HELD = 15
"""The most that a body may hold the loop, in units of `reference_s`."""
TRIES = 3
MB = 1 << 20
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"


def rerank(**fields: Any) -> dict[str, Any]:
    return {"query": "hi", "documents": ["a"]} | fields


BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]], int]] = {
    "2,048 texts": (EMBEDDINGS, lambda: {"input": ["a"] * 2048}, 200),
    "2,048 texts, cut": (EMBEDDINGS, lambda: {"input": ["a"] * 2048, "dimensions": 1000}, 200),
    "400 texts in 2 kB": (EMBEDDINGS, lambda: {"input": ["a"] * 400}, 200),
    "a million texts": (EMBEDDINGS, lambda: {"input": ["a"] * 1_000_000}, 400),
    "2,048 documents": (RERANK, lambda: rerank(documents=["a"] * 2048), 200),
    "400 documents in 2 kB": (RERANK, lambda: rerank(documents=["a"] * 400), 200),
    "190 documents in 1 kB": (RERANK, lambda: rerank(documents=["a"] * 190), 200),
    "a document of 30 MB": (RERANK, lambda: rerank(documents=["Hello world, " * (30 * MB // 13)]), 400),
    "a query of 8 MB for 2,048 documents": (
        RERANK,
        lambda: rerank(query="Hi " * 2_700_000, documents=["a"] * 2048),
        400,
    ),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[ServerProcess, Holds]]]:
    folder = tmp_path_factory.mktemp("m")
    embedder = configured(folder / "wide", "Qwen3Model", hidden_size=2048, is_matryoshka=True)
    reranker = add_logit_score(configured(folder / "ranks", "Qwen3ForCausalLM"), 5, 6)
    add_tokenizer(reranker, template=RERANK_TEMPLATE)
    holds = [Holds(folder / name) for name in ("embedder", "reranker")]

    def watched(model: Path, of: Holds) -> Any:
        environment = {"LOOP_WATCH": str(of.path), "FAKE_TOKEN_S": "0.002"}
        return running(model, "--no-events", fake=True, environment=environment)

    with watched(embedder, holds[0]) as one, watched(reranker, holds[1]) as two:
        for server, path, body in ((one, EMBEDDINGS, {"input": "a"}), (two, RERANK, rerank())):
            with server.client() as http:  # once its readers run, and the first request has been answered
                assert http.post("/tokenize", json={"prompt": "a " * 20_000}).status_code == 200
                assert http.post(path, json=body).status_code == 200
        yield {EMBEDDINGS: (one, holds[0]), RERANK: (two, holds[1])}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BODIES)
def test_no_list_of_texts_holds_the_event_loop(servers: dict[str, tuple[ServerProcess, Holds]], name: str) -> None:
    path, make, status = BODIES[name]
    (server, holds), body = servers[path], json.dumps(make()).encode()
    held: list[float] = []
    while len(held) < TRIES and (not held or held[-1] >= 1000 * HELD * reference_s()):
        holds.clear()
        with server.client() as http:
            answer = http.post(path, content=body)
        assert answer.status_code == status, answer.text[:500]
        held.append(holds.worst_ms())
    assert min(held) < 1000 * HELD * reference_s(), held
