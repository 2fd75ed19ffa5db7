"""Typed bodies of the endpoints that make vectors and numbers of texts: OpenAI's embeddings, vLLM's pooling, classify
and score, Jina's and Cohere's rerank."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from treeline_runtime.server import openai
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.fields import Body
from treeline_runtime.server.sampling import Count, PositiveCount, Priority

EncodingFormat = Literal["float", "base64"]
TEXTS = str | list[str]


class PoolingFields(Body, frozen=True, kw_only=True):
    """What all of them have."""

    model: str | None = None
    cache_salt: openai.Salt = None
    extra_key: openai.Salt = None
    rid: openai.Rid | None = None
    priority: Priority | None = None


class EmbeddingBody(PoolingFields, frozen=True, kw_only=True):
    """Texts, or their token ids. `dimensions` where the model was trained for it."""

    normalize: bool | None = None
    use_activation: bool | None = None
    input: openai.Texts
    encoding_format: EncodingFormat | None = None
    dimensions: PositiveCount | None = None
    add_special_tokens: bool | None = None


class TextsOrChat(PoolingFields, frozen=True, kw_only=True):
    """Either `input` or `messages`, which are one conversation."""

    input: openai.MaybeTexts = None
    messages: openai.MaybeConversation = None
    documents: openai.Documents = None
    add_generation_prompt: openai.TemplateFlag = None
    continue_final_message: openai.TemplateFlag = None
    chat_template_kwargs: openai.Variables = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None


class PoolingBody(TextsOrChat, frozen=True, kw_only=True):
    """Either `input` or `messages`, which are one conversation. Vectors come as the model makes them."""

    encoding_format: EncodingFormat | None = None
    normalize: bool | None = None
    """The former name of `use_activation`."""


class ClassifyBody(TextsOrChat, frozen=True, kw_only=True):
    """Either `input` or `messages`. Without `use_activation: false`, which asks for the head's own outputs,
    probabilities."""


class PairFields(PoolingFields, frozen=True, kw_only=True):
    """What is compared, and how."""

    instruct: Annotated[str | None, Meta(description="Where the model's chat template has a place for it.")] = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    """False is refused: a pair is not a pair without them."""


class ScoreBody(PairFields, frozen=True, kw_only=True):
    """A text and others, or as many of both. The other names of the texts are vLLM's."""

    text_1: TEXTS | None = None
    text_2: TEXTS | None = None
    data_1: TEXTS | None = None
    queries: TEXTS | None = None
    data_2: TEXTS | None = None
    documents: TEXTS | None = None
    items: TEXTS | None = None

    @property
    def first(self) -> TEXTS | None:
        """Raises ApiError 400 where several names are used."""
        return self._one_of("text_1", "data_1", "queries")

    @property
    def second(self) -> TEXTS | None:
        """Raises ApiError 400 where several names are used."""
        return self._one_of("text_2", "data_2", "documents", "items")

    def _one_of(self, name: str, *others: str) -> TEXTS | None:
        given = [known for known in (name, *others) if getattr(self, known) is not None]
        for other in given[1:]:
            raise ApiError(400, f"{other!r} is another name of {given[0]!r}, which is there, too", param=other)
        found: TEXTS | None = getattr(self, given[0]) if given else None
        return found


class DocumentBody(Body, frozen=True):
    """A document as an object."""

    harmless: ClassVar = {}
    text: str


class RerankBody(PairFields, frozen=True, kw_only=True):
    """Documents, to be sorted by relevance to a query. `top_n` is all of them unless it is there."""

    query: str
    documents: Annotated[list[str | DocumentBody], Meta(extra_json_schema={"minItems": 1})]
    top_n: Count | None = None
    """0, vLLM's default: all of them."""
    return_documents: bool | None = None
