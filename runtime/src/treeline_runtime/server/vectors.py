"""`/v1/embeddings`, `/pooling`, `/classify`, `/v1/score` and `/v1/rerank`: texts as vectors, and how they are answered.

Numbers are read and written without numpy, which this process does without. Vectors are float32, little endian as all
machines that run models are.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response
from msgspec import UNSET, Struct

from treeline_runtime.messages import TextOut
from treeline_runtime.models.pooling import Activation, Pooling
from treeline_runtime.server import answers, openai, schema
from treeline_runtime.server import pooling_fields as fields
from treeline_runtime.server.dependencies import Generating, ReadingRoute
from treeline_runtime.server.errors import ApiError, Header
from treeline_runtime.server.http import Answer, ApiRequest, json_answer
from treeline_runtime.server.jobs import ClassifyTask, GenerationJob, RerankTask, ScoreTask, VectorsTask
from treeline_runtime.server.pacing import Pacer, encode_json, opened
from treeline_runtime.server.service import Service, token_headers

FLOAT_BYTES = 24
"""What a number of a vector takes while an answer is made: as JSON, and before that as a float."""

SHOWN_BYTES = 2
"""What a character of a document takes that is shown in an answer: itself, and as JSON. Most are ASCII."""


router = APIRouter(route_class=ReadingRoute)


@router.post(
    "/v1/embeddings",
    **schema.operation(
        tag=schema.OPENAI, summary="Vectors of texts", body=fields.EmbeddingBody, answer=answers.Embeddings
    ),
)
async def embeddings(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "embed")
    task = await service.read(asked, "embedding", VectorsTask)
    if task.dimensions is not None:
        check_dimensions(service.pools(), task.dimensions)
    outs = await _outs(asked, task.job)
    head = answers.Embeddings("list", service.model_name, _usage(task.job), [])
    return await _answer(service, task, outs, head, lambda *item: answers.Embedding("embedding", *item))


@router.post(
    "/pooling",
    **schema.operation(
        tag=schema.VECTORS,
        summary="What the model makes of texts, as it is",
        body=fields.PoolingBody,
        answer=answers.Pooled,
    ),
)
async def pooling(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "embed", "score", "reward")
    task = await service.read(asked, "pooling", VectorsTask)
    outs = await _outs(asked, task.job)
    envelope = openai.envelope(task.job.rid, "list", service.model_name)
    head = answers.Pooled(**envelope, usage=_usage(task.job), data=[])
    return await _answer(service, task, outs, head, lambda *item: answers.PooledItem("pooling", *item))


_CLASSIFY = schema.operation(
    tag=schema.VECTORS,
    summary="What a classification head says of texts",
    body=fields.ClassifyBody,
    answer=answers.Classified,
)


@router.post("/classify", **_CLASSIFY)
@router.post("/v1/classify", **_CLASSIFY)
async def classify(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "reward", "score")
    task = await service.read(asked, "classify", ClassifyTask)
    outs = await _outs(asked, task.job)
    made = service.pools()
    labels = made.labels or ("LABEL_0",)

    def item(index: int) -> bytes:
        probs = activated(_floats(outs[index]), made.activation if task.activation else "identity")
        likeliest = max(range(len(probs)), key=probs.__getitem__)
        return encode_json(answers.ClassifiedItem(index, labels[likeliest], probs, len(probs)))

    envelope = openai.envelope(task.job.rid, "list", service.model_name)
    head = answers.Classified(**envelope, usage=_usage(task.job), data=[])
    return await _listed(head, item, len(outs), _headers(task.job, outs))


_SCORE = schema.operation(
    tag=schema.VECTORS, summary="How relevant texts are to others", body=fields.ScoreBody, answer=answers.Scores
)


@router.post("/score", **_SCORE)
@router.post("/v1/score", **_SCORE)
async def score(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "score")
    task = await service.read(asked, "score", ScoreTask)
    outs = await _outs(asked, task.job)
    scores = _scores(service, outs, activation=task.activation)
    data = [answers.ScoreItem(index, "score", value) for index, value in enumerate(scores)]
    head = openai.envelope(task.job.rid, "list", service.model_name)
    return json_answer(answers.Scores(**head, data=data, usage=_usage(task.job)), headers=_headers(task.job, outs))


_RERANK = schema.operation(
    tag=schema.VECTORS, summary="Documents by relevance", body=fields.RerankBody, answer=answers.Ranking
)


@router.post("/rerank", **_RERANK)
@router.post("/v1/rerank", **_RERANK)
@router.post("/v2/rerank", **_RERANK)
async def rerank(asked: Generating) -> Response:
    service = asked.service
    service.admit_for(asked, "score")
    task = await service.read(asked, "rerank", RerankTask)
    texts = sum(map(len, task.documents or ()))
    outs = await _outs(asked, task.job, shown_bytes=SHOWN_BYTES * texts)
    scores = _scores(service, outs, activation=task.activation)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: task.top_n]  # the earlier one among equals

    def item(place: int) -> bytes:
        index = order[place]
        document = UNSET if task.documents is None else answers.RankedDocument(task.documents[index])
        return encode_json(answers.Ranked(index, scores[index], document))

    head = answers.Ranking(task.job.rid, "list", service.model_name, _usage(task.job), [])
    return await _listed(head, item, len(order), _headers(task.job, outs))


# ---- vectors --------------------------------------------------------------------------------------------------------


async def _outs(asked: ApiRequest, job: GenerationJob, shown_bytes: int = 0) -> list[TextOut]:
    """One for each prompt, each with its vector. `shown_bytes`: of what else the answer has. Raises ApiError."""
    service = asked.service
    made = FLOAT_BYTES * service.pools().size * len(job.prompts)
    outs = await service.collect(await service.open(job, asked, answer_bytes=made + shown_bytes))
    if any(out.vector is None for out in outs):  # by an operator, or the engine is being stopped
        raise ApiError(503, "The request was aborted", type="server_error")
    return outs


async def _answer(
    service: Service,
    task: VectorsTask,
    outs: Sequence[TextOut],
    head: answers.Embeddings | answers.Pooled,
    as_item: Callable[[int, list[float] | str], answers.Embedding | answers.PooledItem],
) -> Response:
    """`data` with an item for each vector: `as_item` has its index, and its numbers as they are written."""
    made = service.pools()

    def item(index: int) -> bytes:
        vector = _vector(outs[index])
        if task.dimensions is not None:
            vector = cut(vector, task.dimensions, normalize=made.normalize)
        written = base64.b64encode(vector).decode() if task.base64 else vector.tolist()
        return encode_json(as_item(index, written))

    return await _listed(head, item, len(outs), _headers(task.job, outs))


async def _listed(head: Struct, item: Callable[[int], bytes], count: int, headers: tuple[Header, ...]) -> Response:
    """An answer whose last member is a list of `count` items, each written in its turn."""
    pieces, pacer = [opened(head)], Pacer()
    for index in range(count):
        pieces += [b"," if index else b"", item(index)]
        await pacer.rest()
    return Answer([*pieces, b"]}"], headers=headers)


def _headers(job: GenerationJob, outs: Sequence[TextOut]) -> tuple[Header, ...]:
    return tuple(token_headers(job.prompt_tokens, sum(out.cached_tokens for out in outs)))


def _usage(job: GenerationJob) -> answers.VectorUsage:
    return answers.VectorUsage(job.prompt_tokens, job.prompt_tokens)


def _vector(out: TextOut) -> array[float]:
    return array("f", out.vector or b"")


def _floats(out: TextOut) -> list[float]:
    return _vector(out).tolist()


def check_dimensions(made: Pooling, dimensions: int) -> None:
    """Raises ApiError 400 where vectors may not be cut to so many."""
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
    raise ApiError(400, f"Invalid value for 'dimensions': {problem}", param="dimensions")


def cut(vector: array[float], dimensions: int, *, normalize: bool) -> array[float]:
    """The first dimensions of a vector; with a length of 1 again, where vectors have that."""
    short = vector[:dimensions]
    if not normalize:
        return short
    length = max(math.hypot(*short), 1e-12)
    return array("f", [value / length for value in short])


# ---- numbers --------------------------------------------------------------------------------------------------------


def _scores(service: Service, outs: Sequence[TextOut], *, activation: bool) -> list[float]:
    name = service.pools().activation if activation else "identity"
    return [activated(_floats(out), name)[0] for out in outs]


def activated(outputs: list[float], activation: Activation) -> list[float]:
    """What a head's outputs mean, where they are not taken as they are."""
    if activation == "sigmoid":
        # of the two forms the one that does not overflow
        return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in outputs]
    if activation == "softmax":
        top = max(outputs)
        shares = [math.exp(x - top) for x in outputs]
        total = sum(shares)
        return [share / total for share in shares]
    return outputs
