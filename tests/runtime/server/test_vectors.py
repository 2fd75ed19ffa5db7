"""Embeddings, scores and rankings: shapes and refusals, with a scheduler that has no model; and, with the real engine
and the openai client, the numbers that transformers computes."""

from __future__ import annotations

import base64
import json
import math
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from support.fake_scheduler import Magic, vector_of
from support.openapi import Judge
from support.pooling_models import add_modules, add_tokenizer, configured
from support.runtime_models import reference, save
from support.runtime_server import ServerProcess, eventually, running
from treeline_wire import headers

HIDDEN = 32
EMBEDDINGS = "/v1/embeddings"
TEXTS = ["The capital of France is Paris.", "hello world", "one two three four five"]


# ---- fake: an embedding model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = configured(tmp_path_factory.mktemp("m") / "vectors", "Qwen3Model", matryoshka_dimensions=[8, 16])
    with running(path, "--no-events", fake=True) as server:
        yield server


@pytest.fixture(scope="module")
def embed(embedder: ServerProcess) -> Iterator[httpx.Client]:
    with embedder.client() as client:
        yield client


def tokens(http: httpx.Client, text: str) -> list[int]:
    return list(http.post("/tokenize", json={"prompt": text}).json()["tokens"])


def test_an_answer_is_exactly_openais(embed: httpx.Client) -> None:
    answer = embed.post(EMBEDDINGS, json={"model": "vectors", "input": TEXTS})
    ids = [tokens(embed, text) for text in TEXTS]
    count = sum(map(len, ids))
    assert answer.json() == {
        "object": "list",
        "model": "vectors",
        "data": [
            {"object": "embedding", "index": i, "embedding": list(vector_of(one, HIDDEN))} for i, one in enumerate(ids)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    assert answer.headers[headers.PROMPT_TOKENS] == str(count)
    assert answer.headers[headers.CACHED_TOKENS] == "9"


def test_texts_and_their_tokens_give_the_same(embed: httpx.Client) -> None:
    ids = [tokens(embed, text) for text in TEXTS]
    whole = embed.post(EMBEDDINGS, json={"input": TEXTS}).json()["data"]
    assert embed.post(EMBEDDINGS, json={"input": ids}).json()["data"] == whole
    assert embed.post(EMBEDDINGS, json={"input": ids[0]}).json()["data"] == whole[:1]
    assert embed.post(EMBEDDINGS, json={"input": TEXTS[0]}).json()["data"] == whole[:1]
    many = embed.post(EMBEDDINGS, json={"input": TEXTS * 300}).json()["data"]  # read by another process
    assert [item["embedding"] for item in many] == [item["embedding"] for item in whole] * 300
    assert [item["index"] for item in many] == list(range(900))


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "Missing required parameter"),
        ({"input": None}, "input", "Missing required parameter"),
        ({"input": ""}, "input", "must not be an empty string"),
        ({"input": ["a", ""]}, "input", "must not be an empty string"),
        ({"input": []}, "input", "must not be an empty list"),
        ({"input": [[]]}, "input", "must not be empty"),
        ({"input": 5}, "input", "must be a string, a list of strings, or token ids"),
        ({"input": ["a", 5]}, "input", "token ids"),
        ({"input": [1, -1]}, "input", "non-negative"),
        ({"input": [1, 1 << 20]}, "input", "is not below"),
        ({"input": {"text": "a"}}, "input", "must be a string"),
        ({"input": ["a"] * 2049}, "input", "2049 in 'input': at most 2048"),
        ({"input": list(range(3, 50)) * 100}, "input", "maximum context length is 4096 tokens"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "dimensions": 12}, "dimensions", "may be cut to 8, 16 alone"),
        ({"input": "a", "dimensions": 33}, "dimensions", "have 32 dimensions"),
        ({"input": "a", "add_special_tokens": "yes"}, "add_special_tokens", ""),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "stream": True}, "stream", "not supported"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "not supported"),
        ({"input": "a", "cache_salt": 5}, "cache_salt", ""),
        ({"input": "a", "normalize": False}, "normalize", "made with true"),
        ({"input": "a", "use_activation": False}, "use_activation", "made with true"),
        ({"input": "a", "softmax": False}, "softmax", "not supported"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_requests_for_vectors_are_refused(
    embed: httpx.Client, body: dict[str, Any], param: str, says: str
) -> None:
    answer = embed.post(EMBEDDINGS, content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert says in error["message"]


def test_other_and_unknown_models_are_refused(embed: httpx.Client) -> None:
    assert embed.post(EMBEDDINGS, json={"model": "other", "input": "a"}).status_code == 404
    for body in (
        {"input": "a", "user": "me"},
        {"input": "a", "dimensions": None, "truncate_prompt_tokens": -1},
        {"input": "a", "normalize": True, "use_activation": True, "embed_dtype": "float32", "endianness": "native"},
    ):
        assert embed.post(EMBEDDINGS, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/generate", {"text": "hi"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/classify", {"input": "a"}),
    ],
)
def test_an_embedding_model_names_its_own_paths(embed: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = embed.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_task")
    assert f"{path} is not for this model: 'vectors' makes embeddings. Use /v1/embeddings" in error["message"]


def test_the_server_reports_its_task_and_its_health(embed: httpx.Client, embedder: ServerProcess) -> None:
    info = embed.get("/server_info").json()
    assert (info["task"], info["pooling"]["size"], info["pooling"]["dimensions"]) == ("embed", HIDDEN, [8, 16])
    assert embed.get("/model_info").json()["is_generation"] is False
    assert embed.get("/health_generate").status_code == 200
    before = counted(embedder)
    embed.post(EMBEDDINGS, json={"input": TEXTS})
    after = counted(embedder)
    assert after["num_vectors_total"] - before["num_vectors_total"] == 3
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == sum(len(tokens(embed, t)) for t in TEXTS)
    assert after["num_requests_total"] - before["num_requests_total"] == 3
    assert after["generation_tokens_total"] == 0


def test_a_request_that_an_operator_ends_is_a_503(embedder: ServerProcess) -> None:
    with embedder.client() as http, embedder.admin() as admin, ThreadPoolExecutor(1) as others:
        waiting = others.submit(http.post, EMBEDDINGS, json={"input": [[5, 6], [Magic.SILENT]], "rid": "mine"})

        def ended() -> bool:
            admin.post("/abort_request", json={"rid": "mine"})
            return waiting.done()

        eventually(ended, 60, "the request ends")
        answer = waiting.result()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "The request was aborted")


def counted(server: ServerProcess) -> dict[str, float]:
    with server.metrics() as client:
        page = client.get("/metrics").text
    return {found[1]: float(found[2]) for found in re.finditer(r"^treeline:(\w+)\{[^}]*\} (\S+)$", page, re.MULTILINE)}


# ---- fake: rerankers, classifiers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = configured(tmp_path_factory.mktemp("m") / "ranks", "Qwen3ForSequenceClassification", id2label={"0": "yes"})
    with running(path, "--no-events", fake=True) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def judge_of_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    labels = {"0": "good", "1": "bad", "2": "ugly"}
    path = configured(tmp_path_factory.mktemp("m") / "judge", "Qwen3ForSequenceClassification", id2label=labels)
    with running(path, "--no-events", fake=True) as server, server.client() as client:
        yield client


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def outputs(http: httpx.Client, query: str, document: str) -> float:
    """Return the expected score. Without a post-processor the tokenizer joins the ids of both."""
    return float(vector_of(tokens(http, query) + tokens(http, document), 1)[0])


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_a_ranking(reranker: httpx.Client, path: str) -> None:
    body = {"model": "ranks", "query": "hello world", "documents": [*TEXTS, {"text": "hello"}]}
    answer = reranker.post(path, json=body).json()
    documents = [*TEXTS, "hello"]
    scores = [sigmoid(outputs(reranker, "hello world", one)) for one in documents]
    order = sorted(range(4), key=lambda i: -scores[i])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["document"] for one in answer["results"]] == [{"text": documents[i]} for i in order]
    np.testing.assert_allclose([one["relevance_score"] for one in answer["results"]], [scores[i] for i in order])
    count = sum(len(tokens(reranker, one)) for one in documents) + 4 * len(tokens(reranker, "hello world"))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert set(answer) == {"id", "object", "model", "results", "usage"}


def test_a_short_ranking_without_its_documents(reranker: httpx.Client) -> None:
    body = {"query": "hello world", "documents": TEXTS}
    whole = reranker.post("/rerank", json=body).json()["results"]
    short = reranker.post("/rerank", json=body | {"top_n": 2, "return_documents": False}).json()["results"]
    assert short == [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in whole[:2]]
    for everything in (99, 0):  # 0 is what vLLM's clients send for all of them
        assert len(reranker.post("/rerank", json=body | {"top_n": everything}).json()["results"]) == 3
    equal = reranker.post("/rerank", json=body | {"documents": ["same"] * 5}).json()["results"]
    assert [one["index"] for one in equal] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores(reranker: httpx.Client, path: str) -> None:
    def ask(**body: Any) -> list[float]:
        data = reranker.post(path, json=body).json()["data"]
        assert [(one["index"], one["object"]) for one in data] == [(i, "score") for i in range(len(data))]
        return [one["score"] for one in data]

    np.testing.assert_allclose(ask(text_1="hello", text_2="world"), [sigmoid(outputs(reranker, "hello", "world"))])
    many = [sigmoid(outputs(reranker, "hello", text)) for text in TEXTS]
    np.testing.assert_allclose(ask(text_1="hello", text_2=TEXTS), many)
    np.testing.assert_allclose(ask(text_1=["hello"], text_2=TEXTS), many)
    pairs = [sigmoid(outputs(reranker, a, b)) for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
    np.testing.assert_allclose(ask(text_1=TEXTS, text_2=TEXTS[::-1]), pairs)
    for others in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        np.testing.assert_allclose(ask(**dict(zip(others, ("hello", TEXTS), strict=True)), text_1=None), many)
    raw = ask(text_1="hello", text_2=TEXTS, use_activation=False)
    assert raw == [outputs(reranker, "hello", text) for text in TEXTS]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "b"}, {"title": "c"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruct": "judge"}, "instruct"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a " * 5000, "documents": ["b"]}, "documents"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": 5, "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
        ("/v1/score", {"queries": "b", "data_1": "b", "text_2": "c"}, "queries"),
        ("/v1/score", {"query": "b", "items": ["c"], "label_token_ids": [1]}, "query"),
        ("/v1/score", {"text_1": "a", "text_2": "c", "activation": False}, "activation"),
        ("/v1/score", {"text_1": "a", "text_2": "c", "add_special_tokens": False}, "add_special_tokens"),
        ("/pooling", {"input": "a", "use_activation": True}, "use_activation"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rerankers_refuse_other_requests(reranker: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = reranker.post(path, content=json.dumps(body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_classes(judge_of_texts: httpx.Client) -> None:
    made = [vector_of(tokens(judge_of_texts, text), 3) for text in TEXTS]
    for path in ("/classify", "/v1/classify"):
        data = judge_of_texts.post(path, json={"input": TEXTS}).json()["data"]
        for one, vector in zip(data, made, strict=True):
            shares = np.exp(vector) / np.exp(vector).sum()
            np.testing.assert_allclose(one["probs"], shares, rtol=1e-6)
            assert one["label"] == ("good", "bad", "ugly")[int(np.argmax(vector))]
            assert one["num_classes"] == 3
    data = judge_of_texts.post("/classify", json={"input": TEXTS, "use_activation": False}).json()["data"]
    assert [one["probs"] for one in data] == [list(vector) for vector in made]
    data = judge_of_texts.post("/pooling", json={"input": TEXTS}).json()["data"]
    assert [one["data"] for one in data] == [list(vector) for vector in made]
    (one,) = judge_of_texts.post("/pooling", json={"input": TEXTS[0], "encoding_format": "base64"}).json()["data"]
    assert base64.b64decode(one["data"]) == made[0].tobytes()


def test_a_conversation_is_classified_unchanged(judge_of_texts: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    for path, member in (("/classify", "probs"), ("/pooling", "data")):
        for asked in ({}, {"add_generation_prompt": True}):
            told = {"messages": messages, "add_generation_prompt": False} | asked
            ids = judge_of_texts.post("/tokenize", json=told).json()["tokens"]
            raw = {"use_activation": False} if member == "probs" else {}
            answer = judge_of_texts.post(path, json={"messages": messages} | asked | raw)
            assert answer.json()["data"][0][member] == list(vector_of(ids, 3))
    for body, param in (
        ({"input": "a", "messages": messages}, "input"),
        ({}, "input"),
        ({"input": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
    ):
        answer = judge_of_texts.post("/classify", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# ---- the document ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        ("embed", EMBEDDINGS, {"input": TEXTS}),
        ("embed", EMBEDDINGS, {"input": [[1], [2]], "encoding_format": "base64", "dimensions": 8}),
        ("embed", "/pooling", {"input": "a", "user": "me"}),
        ("reranker", "/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
        ("reranker", "/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
        ("reranker", "/v1/score", {"text_1": "a", "text_2": ["b"], "use_activation": None}),
        ("reranker", "/v1/score", {"queries": ["a"], "documents": ["b"]}),
        ("reranker", "/pooling", {"input": "a", "use_activation": False, "embed_dtype": "float32"}),
        ("judge_of_texts", "/classify", {"input": [1, 2]}),
        ("judge_of_texts", "/v1/classify", {"messages": [{"role": "user", "content": "a"}], "cache_salt": "s"}),
        ("judge_of_texts", "/pooling", {"input": "a"}),
    ],
    ids=str,
)
def test_bodies_and_answers_match_the_document(
    request: pytest.FixtureRequest, server: str, path: str, body: dict[str, Any]
) -> None:
    http: httpx.Client = request.getfixturevalue(server)
    document = http.get("/openapi.json").json()
    Judge(document, closed=False).body(path).validate(body)
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    Judge(document).answer(path).validate(answer.json())


# ---- the real engine ------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")


def made(folder: Path, kind: str, **changes: Any) -> Any:
    """Return a model of transformers for the tests' tokenizer, saved to `folder` with it."""
    folder.mkdir(parents=True)
    add_tokenizer(folder, template=changes.pop("template", None))
    theirs = reference("Qwen3", {"vocab_size": 400, "head_dim": 16, "max_position_embeddings": 512} | changes, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(theirs, folder)
    return theirs


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ServerProcess]]:
    folder = tmp_path_factory.mktemp("m") / "embedder"
    theirs = made(folder, "Model")
    add_modules(folder, {"pooling_mode_lasttoken": True})
    with running(folder, "--matryoshka", "--chunked-prefill-size=64") as server:
        yield theirs, server


def expected(theirs: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    import torch

    with torch.inference_mode():
        last = theirs(torch.tensor([ids])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(last, dim=0).numpy()


@pytest.mark.integration
@pytest.mark.deep
def test_the_openai_client_gets_transformers_vectors(real: tuple[Any, ServerProcess]) -> None:
    theirs, server = real
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client, server.client() as http:
        texts = [*TEXTS, "The quick brown fox jumps over the lazy dog. " * 8]
        wanted = [expected(theirs, tokens(http, text)) for text in texts]
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model="embedder", input=texts, **encoding)
            assert answer.usage.prompt_tokens == sum(len(tokens(http, text)) for text in texts)
            for one, vector in zip(answer.data, wanted, strict=True):
                found = one.embedding
                if encoding.get("encoding_format") == "base64":
                    found = np.frombuffer(base64.b64decode(found), "<f4")  # type: ignore[arg-type, assignment]
                np.testing.assert_allclose(found, vector, rtol=1e-4, atol=1e-5)
        short = client.embeddings.create(model="embedder", input=texts[0], dimensions=24).data[0].embedding
        np.testing.assert_allclose(short, wanted[0][:24] / np.linalg.norm(wanted[0][:24]), rtol=1e-4, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="empty string"):
            client.embeddings.create(model="embedder", input="")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
            client.embeddings.create(model="embedder", input="hello " * 2000)
        with pytest.raises(openai.BadRequestError, match="Use /v1/embeddings"):
            client.completions.create(model="embedder", prompt="hi")


@pytest.mark.integration
@pytest.mark.deep
def test_a_client_that_leaves_frees_everything(real: tuple[Any, ServerProcess]) -> None:
    _, server = real
    with server.client() as http, httpx.Client(base_url=server.url, timeout=0.05) as hasty:
        with pytest.raises(httpx.ReadTimeout):
            hasty.post(EMBEDDINGS, json={"input": ["The quick brown fox " * 60] * 400})
        eventually(server.idle, 60, "everything is released")
        assert http.get("/health_generate").status_code == 200
