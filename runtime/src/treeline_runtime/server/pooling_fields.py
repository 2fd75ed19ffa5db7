"""Typed bodies of the endpoints that make vectors and numbers of texts: OpenAI's embeddings, vLLM's pooling, classify
and score, Jina's and Cohere's rerank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from treeline_runtime.server import openai
from treeline_runtime.server.sampling import Count, PositiveCount, Priority

EncodingFormat = Literal["float", "base64"]
TEXTS = str | list[str]


class PoolingFields(Struct, frozen=True):
    """What all of them have."""

    model: str | None = None
    rid: openai.Rid | None = None
    priority: Priority | None = None


class VectorFields(PoolingFields, frozen=True):
    """What of vectors cannot be chosen, but may be said as it is."""

    normalize: bool | None = None
    """The former name of `use_activation`."""
    use_activation: bool | None = None


class EmbeddingBody(VectorFields, frozen=True):
    """What of a `/v1/embeddings` request we act on."""

    input: Any = None
    encoding_format: EncodingFormat | None = None
    dimensions: PositiveCount | None = None
    add_special_tokens: bool | None = None


class PoolingBody(VectorFields, frozen=True):
    """`/pooling`: either `input`, or one conversation."""

    input: Any = None
    messages: Any = None
    encoding_format: EncodingFormat | None = None
    add_special_tokens: bool | None = None


class ClassifyBody(PoolingFields, frozen=True):
    """`/classify`: the same."""

    input: Any = None
    messages: Any = None
    use_activation: bool | None = None
    """False: the head's own outputs."""
    add_special_tokens: bool | None = None


class PairFields(PoolingFields, frozen=True, kw_only=True):
    """What is compared, and how."""

    instruct: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    """False is refused: a pair is not a pair without them."""


class ScoreBody(PairFields, frozen=True, kw_only=True):
    """`/v1/score`: one text and many, or as many of both."""

    text_1: TEXTS | None = None
    text_2: TEXTS | None = None


class DocumentBody(Struct, frozen=True):
    text: str


class RerankBody(PairFields, frozen=True, kw_only=True):
    query: str
    documents: list[str | DocumentBody]
    top_n: Count | None = None
    """0, vLLM's default: all of them."""
    return_documents: bool | None = None


SCORE_NAMES: Mapping[str, str] = {
    "data_1": "text_1",
    "queries": "text_1",
    "data_2": "text_2",
    "documents": "text_2",
    "items": "text_2",
}
"""What vLLM calls the texts of `/v1/score` besides → how we do."""


def known(body: type[Struct]) -> frozenset[str]:
    """The fields that a request of this body may have with any value."""
    names = frozenset(body.__struct_fields__) | openai.NAMESPACE_FIELDS
    return names | openai.TEMPLATE_FIELDS if "messages" in names else names
