"""`/v1/embeddings`, `/pooling`, `/classify`, `/v1/score` and `/v1/rerank`.

Without numpy, which this process does not load. Vectors are float32, little-endian.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Response
from msgspec import UNSET, Struct

from treeline_runtime.messages import TextOut
from treeline_runtime.models.pooling import Activation, Pooling
from treeline_runtime.server import answers, openai, pooling_reader, schema
from treeline_runtime.server.dependencies import Call, call_of
from treeline_runtime.server.errors import ApiError, invalid
from treeline_runtime.server.http import Answer, ApiRequest
from treeline_runtime.server.jobs import PoolingTask
from treeline_runtime.server.limits import INLINE_PAIRS_BYTES, INLINE_TEXTS_BYTES
from treeline_runtime.server.pacing import Pacer, encode_json, opened
from treeline_runtime.server.service import Service, token_headers

FLOAT_BYTES = 24
"""Bytes per number while answering: as JSON, and before as a float."""

SHOWN_BYTES = 2
"""Bytes per character of a shown document: itself, and as JSON. Most are ASCII."""


router = APIRouter()


@schema.post(
    router,
    "/v1/embeddings",
    tag=schema.OPENAI,
    summary="Embeddings of texts",
    body=pooling_reader.EmbeddingBody,
    answer=answers.Embeddings,
)
async def embeddings(
    call: Annotated[Call[PoolingTask], call_of("embedding", "embed", inline_bytes=INLINE_TEXTS_BYTES)],
) -> Response:
    service, asked, task = call
    if task.dimensions is not None:
        check_dimensions(service.pools(), task.dimensions)
    outs = await _outs(service, asked, task)
    head = answers.Embeddings("list", service.name_of(task), _usage(task), [])
    return await _vectors(service, task, outs, head, lambda *item: answers.Embedding("embedding", *item))


@schema.post(
    router,
    "/pooling",
    tag=schema.VECTORS,
    summary="The model's raw outputs for texts",
    body=pooling_reader.PoolingBody,
    answer=answers.Pooled,
)
async def pooling(
    call: Annotated[Call[PoolingTask], call_of("pooling", "embed", "score", "reward", inline_bytes=INLINE_TEXTS_BYTES)],
) -> Response:
    service, asked, task = call
    outs = await _outs(service, asked, task)
    head = answers.Pooled(**_envelope(service, task), data=[])
    return await _vectors(service, task, outs, head, lambda *item: answers.PooledItem("pooling", *item))


@schema.post(
    router,
    "/v1/classify",
    "/classify",
    tag=schema.VECTORS,
    summary="Class probabilities of texts",
    body=pooling_reader.ClassifyBody,
    answer=answers.Classified,
)
async def classify(
    call: Annotated[Call[PoolingTask], call_of("classify", "reward", "score", inline_bytes=INLINE_TEXTS_BYTES)],
) -> Response:
    service, asked, task = call
    outs, made = await _outs(service, asked, task), service.pools()
    labels = made.labels or ("LABEL_0",)

    def item(index: int) -> Struct:
        probs = activated(_floats(outs[index]), made.activation if task.activation else "identity")
        likeliest = max(range(len(probs)), key=probs.__getitem__)
        return answers.ClassifiedItem(index, labels[likeliest], probs, len(probs))

    return await _listed(task, outs, answers.Classified(**_envelope(service, task), data=[]), item, len(outs))


@schema.post(
    router,
    "/v1/score",
    "/score",
    tag=schema.VECTORS,
    summary="Relevance scores of pairs of texts",
    body=pooling_reader.ScoreBody,
    answer=answers.Scores,
)
async def score(
    call: Annotated[Call[PoolingTask], call_of("score", "score", inline_bytes=INLINE_PAIRS_BYTES)],
) -> Response:
    service, asked, task = call
    outs = await _outs(service, asked, task)
    scores = _scores(service, task, outs)
    head = answers.Scores(**_envelope(service, task), data=[])
    return await _listed(task, outs, head, lambda index: answers.ScoreItem(index, "score", scores[index]), len(outs))


@schema.post(
    router,
    "/v2/rerank",
    "/v1/rerank",
    "/rerank",
    tag=schema.VECTORS,
    summary="Sort documents by relevance",
    body=pooling_reader.RerankBody,
    answer=answers.Ranking,
)
async def rerank(
    call: Annotated[Call[PoolingTask], call_of("rerank", "score", inline_bytes=INLINE_PAIRS_BYTES)],
) -> Response:
    service, asked, task = call
    texts = task.documents
    outs = await _outs(service, asked, task, shown_bytes=SHOWN_BYTES * sum(map(len, texts or ())))
    scores = _scores(service, task, outs)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: task.top_n]  # the earlier one among equals

    def item(place: int) -> Struct:
        index = order[place]
        return answers.Ranked(index, scores[index], UNSET if texts is None else answers.RankedDocument(texts[index]))

    head = answers.Ranking(task.rid, "list", service.name_of(task), _usage(task), [])
    return await _listed(task, outs, head, item, len(order))


async def _outs(service: Service, asked: ApiRequest, task: PoolingTask, shown_bytes: int = 0) -> list[TextOut]:
    """One output per prompt, each with its vector. `shown_bytes`: of the rest of the answer. Raises ApiError."""
    made = FLOAT_BYTES * service.pools().size * len(task.prompts)
    outs = await service.collect(await service.open(task, asked, answer_bytes=made + shown_bytes))
    if any(out.vector is None for out in outs):  # by an operator, or the engine is being stopped
        raise ApiError(503, "The request was aborted")
    return outs


async def _vectors(
    service: Service,
    task: PoolingTask,
    outs: Sequence[TextOut],
    head: answers.Embeddings | answers.Pooled,
    as_item: Callable[[int, list[float] | str], Struct],
) -> Response:
    """`data` with an item per vector: `as_item` gets its index and its written numbers."""
    normalize = service.pools().normalize

    def item(index: int) -> Struct:
        vector = _vector(outs[index])
        if task.dimensions is not None:
            vector = cut(vector, task.dimensions, normalize=normalize)
        return as_item(index, base64.b64encode(vector).decode() if task.base64 else vector.tolist())

    return await _listed(task, outs, head, item, len(outs))


async def _listed(
    task: PoolingTask, outs: Sequence[TextOut], head: Struct, item: Callable[[int], Struct], count: int
) -> Response:
    """An answer whose last member is a list of `count` items, written one by one."""
    pieces, pacer = [opened(head)], Pacer()
    for index in range(count):
        pieces += [b"," if index else b"", encode_json(item(index))]
        await pacer.rest()
    headers = token_headers(task.prompt_tokens, sum(out.cached_tokens for out in outs))
    return Answer([*pieces, b"]}"], headers=headers)


def _envelope(service: Service, task: PoolingTask) -> dict[str, Any]:
    return {**openai.envelope(task.rid, "list", service.name_of(task)), "usage": _usage(task)}


def _usage(task: PoolingTask) -> answers.VectorUsage:
    return answers.VectorUsage(task.prompt_tokens, task.prompt_tokens)


def _vector(out: TextOut) -> array[float]:
    return array("f", out.vector or b"")


def _floats(out: TextOut) -> list[float]:
    return _vector(out).tolist()


def check_dimensions(made: Pooling, dimensions: int) -> None:
    """Raises ApiError 400 if vectors may not be shortened to this."""
    size, shorter = made.size, made.shorter
    if dimensions == size or (dimensions < size and (shorter is None or dimensions in shorter)):
        return
    problem = f"this model's embeddings have {size} dimensions"
    if shorter:
        problem += f", and may be cut to {', '.join(map(str, shorter))} alone"
    elif dimensions < size:
        problem += (
            ", and config.json does not say that they may be cut (is_matryoshka): start the server with --matryoshka"
        )
    raise invalid("dimensions", problem, code=None)


def cut(vector: array[float], dimensions: int, *, normalize: bool) -> array[float]:
    """A vector's first dimensions, normalized again if vectors are."""
    short = vector[:dimensions]
    if not normalize:
        return short
    length = max(math.hypot(*short), 1e-12)
    return array("f", [value / length for value in short])


def _scores(service: Service, task: PoolingTask, outs: Sequence[TextOut]) -> list[float]:
    name = service.pools().activation if task.activation else "identity"
    return [activated(_floats(out), name)[0] for out in outs]


def activated(outputs: list[float], activation: Activation) -> list[float]:
    """A head's outputs after the activation, unless raw ones are requested."""
    if activation == "sigmoid":
        # of the two forms the one that does not overflow
        return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in outputs]
    if activation == "softmax":
        top = max(outputs)
        shares = [math.exp(x - top) for x in outputs]
        total = sum(shares)
        return [share / total for share in shares]
    return outputs
