"""Bodies of vector requests → tasks, as `reader` does for text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.server import openai
from treeline_runtime.server.errors import invalid, missing, wrong
from treeline_runtime.server.fields import Body, check_unknown
from treeline_runtime.server.jobs import Caller, PoolingTask
from treeline_runtime.server.limits import MAX_INPUTS, Limits
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.sampling import Count, PositiveCount, Priority

EncodingFormat = Literal["float", "base64"]
TEXTS = str | list[str]


class PoolingFields(Body, frozen=True, kw_only=True):
    """Fields of all of them."""

    model: str | None = None
    cache_salt: openai.Salt = None
    extra_key: openai.Salt = None
    rid: openai.Rid | None = None
    priority: Priority | None = None


class EmbeddingBody(PoolingFields, frozen=True, kw_only=True):
    """Texts, or their token ids. `dimensions` if the model was trained for it."""

    normalize: bool | None = None
    use_activation: bool | None = None
    input: openai.Texts
    encoding_format: EncodingFormat | None = None
    dimensions: PositiveCount | None = None
    add_special_tokens: bool | None = None


class TextsOrChat(PoolingFields, frozen=True, kw_only=True):
    """Either `input`, or `messages` as one conversation."""

    input: openai.MaybeTexts = None
    messages: openai.MaybeConversation = None
    documents: openai.Documents = None
    add_generation_prompt: openai.TemplateFlag = None
    continue_final_message: openai.TemplateFlag = None
    chat_template_kwargs: openai.Variables = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None


class PoolingBody(TextsOrChat, frozen=True, kw_only=True):
    """Either `input`, or `messages` as one conversation. Vectors are as the model makes them."""

    encoding_format: EncodingFormat | None = None
    normalize: bool | None = None
    """The old name of `use_activation`."""


class ClassifyBody(TextsOrChat, frozen=True, kw_only=True):
    """Either `input` or `messages`. Returns probabilities, or with `use_activation: false` the head's outputs."""


class PairFields(PoolingFields, frozen=True, kw_only=True):
    """The fields of requests that compare pairs of texts."""

    instruct: Annotated[str | None, Meta(description="Used if the chat template has a place for it.")] = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    """False is refused: a pair needs them."""


class ScoreBody(PairFields, frozen=True, kw_only=True):
    """A text and others, or as many of both. Other names of the texts are vLLM's."""

    text_1: TEXTS | None = None
    text_2: TEXTS | None = None
    data_1: TEXTS | None = None
    queries: TEXTS | None = None
    data_2: TEXTS | None = None
    documents: TEXTS | None = None
    items: TEXTS | None = None

    @property
    def first(self) -> TEXTS | None:
        """Raises ApiError 400 if several names are used."""
        return self._one_of("text_1", "data_1", "queries")

    @property
    def second(self) -> TEXTS | None:
        """Raises ApiError 400 if several names are used."""
        return self._one_of("text_2", "data_2", "documents", "items")

    def _one_of(self, name: str, *others: str) -> TEXTS | None:
        given = [known for known in (name, *others) if getattr(self, known) is not None]
        for other in given[1:]:
            raise wrong(other, f"{other!r} is another name of {given[0]!r}, which is there, too")
        found: TEXTS | None = getattr(self, given[0]) if given else None
        return found


class DocumentBody(Body, frozen=True):
    """A document as an object."""

    harmless: ClassVar = {}
    text: str


class RerankBody(PairFields, frozen=True, kw_only=True):
    """Documents to sort by relevance to a query. `top_n` defaults to all."""

    query: str
    documents: Annotated[list[str | DocumentBody], Meta(extra_json_schema={"minItems": 1})]
    top_n: Count | None = None
    """0 is vLLM's default: all."""
    return_documents: bool | None = None


T = TypeVar("T", bound=PoolingFields)

_FOR_TEMPLATES = ("documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_NOTHING = SamplingParams(max_new_tokens=0)


def check_template(pooling: Pooling | None, prompts: Prompts) -> None:
    """Raises ValueError for a reranking language model without a suitable template."""
    if pooling is not None and pooling.answers and not prompts.knows_pairs:
        raise ValueError(
            "a language model that reranks (LogitScore) needs a chat template (chat_template.jinja) for messages of "
            "the roles query and document"
        )


@dataclass(frozen=True)
class PoolingReader:
    """Reads one body. Raises ApiError 400, or UnknownModel."""

    model: openai.ModelFacts
    raw: Mapping[str, Any]
    limits: Limits
    caller: Caller

    def embedding(self) -> PoolingTask:
        body = self._body(EmbeddingBody)
        self._check_as_made(body)
        base64 = body.encoding_format == "base64"
        return self._task(body, "embd", self._inputs(body), base64=base64, dimensions=body.dimensions)

    def pooling(self) -> PoolingTask:
        body = self._body(PoolingBody)
        self._check_as_made(body)
        return self._task(body, "pool", self._inputs_or_chat(body), base64=body.encoding_format == "base64")

    def classify(self) -> PoolingTask:
        body = self._body(ClassifyBody)
        return self._task(body, "classify", self._inputs_or_chat(body), activation=body.use_activation is not False)

    def score(self) -> PoolingTask:
        body = self._body(ScoreBody)
        first, second = _one_or_more(body.first, "text_1"), _one_or_more(body.second, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise wrong("text_1", f"{len(first)} texts in 'text_1' for {len(second)} in 'text_2'")
        prompts = self._pairs(list(zip(first, second, strict=True)), body, "text_2")
        return self._task(body, "score", prompts, activation=body.use_activation is not False)

    def rerank(self) -> PoolingTask:
        body = self._body(RerankBody)
        (query,) = _texts([body.query], "query")
        documents = _texts([one if isinstance(one, str) else one.text for one in body.documents], "documents")
        return self._task(
            body,
            "rerank",
            self._pairs([(query, document) for document in documents], body, "documents"),
            activation=body.use_activation is not False,
            top_n=body.top_n or None,
            documents=None if body.return_documents is False else documents,
        )

    def _body(self, type: type[T]) -> T:
        body = type.read(self.raw)
        self.model.check_model(body.model)
        return body

    def _check_as_made(self, body: EmbeddingBody | PoolingBody) -> None:
        """Refuses other normalization or activation than the model's."""
        pooling = self.model.pooling
        made = pooling is not None and pooling.normalize
        for name in ("normalize", "use_activation"):
            asked = getattr(body, name)
            if asked is not None and asked != made:
                problem = f"{name!r} cannot be chosen here: this model's vectors are made with {str(made).lower()}"
                raise wrong(name, problem, code="unsupported_parameter")

    @functools.cached_property
    def _namespace(self) -> str | None:
        return openai.namespace(self.raw, self.caller)

    def _task(self, body: PoolingFields, kind: str, prompts: list[list[int]], **shown: Any) -> PoolingTask:
        """`shown`: the task's fields for the answer."""
        priority = body.priority or 0
        return PoolingTask(
            rid=body.rid or openai.new_rid(kind),
            prompts=[GenerateReq("", ids, _NOTHING, self._namespace, priority=priority, pools=True) for ids in prompts],
            hides_cache=self.caller.shares_cache,
            **shown,
        )

    def _inputs(self, body: EmbeddingBody | TextsOrChat) -> list[list[int]]:
        """OpenAI's `input`: a text or its token ids, or several."""
        value = body.input
        if value is None:
            raise missing("input")
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            _check_count(value, "input")
        prompts = openai.prompts_in({"prompt": value, "add_special_tokens": body.add_special_tokens}, "input")
        if any(prompt.text == "" for prompt in prompts):
            raise invalid("input", "must not be an empty string", code=None)
        return self._fitting(self.model.prompts.of_prompts(prompts, self.limits, "input", self._namespace), "input")

    def _inputs_or_chat(self, body: TextsOrChat) -> list[list[int]]:
        if (body.input is None) == (body.messages is None):
            raise wrong("input", "Give exactly one of 'input' and 'messages'")
        if body.messages is None:
            for name in _FOR_TEMPLATES:
                check_unknown({name: getattr(body, name)}, ())  # nothing is rendered
            return self._inputs(body)
        if body.add_special_tokens:
            raise wrong("add_special_tokens", "'add_special_tokens' is for 'input': a chat template writes its own")
        # the judged text is complete: no generation prompt, unless the client asks
        asked = {**self.raw, "add_generation_prompt": self.raw.get("add_generation_prompt") or False}
        return self._fitting([self.model.prompts.of_chat(asked, self.limits, self._namespace)], "messages")

    def _pairs(self, pairs: Sequence[tuple[str, str]], body: PairFields, param: str) -> list[list[int]]:
        if body.instruct is not None:
            _check_text(body.instruct, "instruct")
        if body.add_special_tokens is False:
            problem = "'add_special_tokens' cannot be false: they separate the two texts of a pair"
            raise wrong("add_special_tokens", problem, code="unsupported_parameter")
        pooling = self.model.pooling
        prompts = self.model.prompts.of_pairs(
            pairs,
            self.limits,
            param,
            self._namespace,
            instruct=body.instruct,
            add_generation_prompt=pooling is not None and bool(pooling.answers),
        )
        return self._fitting(prompts, param)

    def _fitting(self, prompts: list[list[int]], param: str) -> list[list[int]]:
        for ids in prompts:
            self.limits.max_new_tokens(len(ids), 0, None, param)
        return prompts


def _one_or_more(texts: str | list[str] | None, param: str) -> list[str]:
    if texts is None:
        raise missing(param)
    return _texts([texts] if isinstance(texts, str) else texts, param)


def _texts(texts: list[str], param: str) -> list[str]:
    if not texts:
        raise invalid(param, "must not be an empty list", code=None)
    _check_count(texts, param)
    for text in texts:
        _check_text(text, param)
    return texts


def _check_text(text: str, param: str) -> None:
    if not text:
        raise invalid(param, "must not be an empty string", code=None)


def _check_count(values: Sequence[object], param: str) -> None:
    if len(values) > MAX_INPUTS:
        raise wrong(param, f"{len(values)} in {param!r}: at most {MAX_INPUTS} in one request")
