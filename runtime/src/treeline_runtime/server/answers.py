"""The structs of answers, used for answers and the OpenAPI document.

Large parts are written in pieces after the rest (`pacing.opened`), so they are the last member, except
`prompt_logprobs`. A test compares real answers with the document.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

Maybe = UnsetType
"""A member that is left out when empty."""


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Any error answer, and the last event of a failed stream."""

    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Reasoning only if the model thinks and its end is a token; predictions only if the server guessed some."""

    reasoning_tokens: int | Maybe = UNSET
    accepted_prediction_tokens: int | Maybe = UNSET
    rejected_prediction_tokens: int | Maybe = UNSET


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | Maybe = UNSET
    completion_tokens_details: CompletionTokensDetails | Maybe = UNSET


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None


FinishReason = Literal["stop", "length", "abort"]
Matched = int | str | None
"""The stop token or string that ended the text."""


ChatFinishReason = Literal["stop", "length", "tool_calls", "abort"]


class CalledFunction(Struct):
    name: str
    arguments: str
    """JSON of an object, unless it was cut off."""


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct):
    """`content` is null if there are only calls. Reasoning, under two names, is present if the server separates it."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | Maybe | None = UNSET
    reasoning: str | Maybe | None = UNSET
    tool_calls: list[ToolCall] | Maybe = UNSET


class PromptLogprob(Struct):
    """By token id. The rank is null for a token that is not among the requested most likely ones."""

    logprob: float | None
    rank: int | None
    decoded_token: str | None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    matched_stop: Matched
    token_ids: list[int] | Maybe = UNSET
    logprobs: ChatLogprobs | None


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    usage: Usage
    prompt_token_ids: list[int] | Maybe = UNSET
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | Maybe = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | Maybe = UNSET


class ToolCallDelta(Struct):
    """The first of a call has its id, type and name; later ones add arguments."""

    index: int
    function: FunctionDelta
    id: str | Maybe = UNSET
    type: Literal["function"] | Maybe = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | Maybe = UNSET
    content: str | Maybe = UNSET
    refusal: Maybe | None = UNSET
    reasoning_content: str | Maybe = UNSET
    reasoning: str | Maybe = UNSET
    tool_calls: list[ToolCallDelta] | Maybe = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    matched_stop: Matched | Maybe = UNSET
    token_ids: list[int] | Maybe = UNSET
    logprobs: ChatLogprobs | None


class ChatChunk(Struct, kw_only=True):
    """An event of a stream. `usage`: with `stream_options`; with `include_usage` a last event has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    usage: Usage | Maybe | None = UNSET
    prompt_token_ids: list[int] | Maybe = UNSET
    choices: list[ChatChunkChoice]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    matched_stop: Matched
    token_ids: list[int] | Maybe = UNSET
    prompt_token_ids: list[int] | Maybe = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | Maybe = UNSET
    logprobs: CompletionLogprobs | None


class Completion(Struct, kw_only=True):
    """An answer, or an event of a stream. Events have `usage` with `stream_options`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    usage: Usage | Maybe | None = UNSET
    choices: list[CompletionChoice]


class MetaInfo(Struct):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    num_retractions: int
    e2e_latency: float
    spec_verify_ct: int | Maybe = UNSET
    """Steps that verified guesses. This and the next ones only if there were some."""
    spec_draft_token_num: int | Maybe = UNSET
    spec_accept_token_num: int | Maybe = UNSET
    input_token_logprobs: list[Any] | Maybe = UNSET
    output_token_logprobs: list[Any] | Maybe = UNSET
    input_top_logprobs: list[Any] | Maybe = UNSET
    output_top_logprobs: list[Any] | Maybe = UNSET


class Generated(Struct):
    """The answer so far: text and lists of an event are cumulative. `index` is present in streams of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | Maybe = UNSET


class Tokens(Struct):
    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class Text(Struct):
    text: str | list[str]


class VectorUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """A vector, or its float32 numbers (little endian) in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Struct):
    object: Literal["list"]
    model: str
    usage: VectorUsage
    data: list[Embedding]


class _List(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: VectorUsage


class PooledItem(Struct):
    object: Literal["pooling"]
    index: int
    data: list[float] | str


class Pooled(_List):
    data: list[PooledItem]


class ClassifiedItem(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classified(_List):
    data: list[ClassifiedItem]


class ScoreItem(Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(_List):
    data: list[ScoreItem]


class RankedDocument(Struct):
    text: str


class Ranked(Struct):
    index: int
    relevance_score: float
    document: RankedDocument | Maybe = UNSET


class Ranking(Struct):
    id: str
    object: Literal["list"]
    model: str
    usage: VectorUsage
    results: list[Ranked]


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    digest: str | UnsetType = UNSET
    """Of an adapter's files: its identity."""


class Models(Struct):
    object: Literal["list"]
    data: list[Model]


class Load(Struct):
    server_load: int


class Version(Struct):
    version: str


class Status(Struct):
    status: str
    heartbeats: int | Maybe = UNSET
    """In answers of `/live`: increases while the server makes progress."""
    warning: str | Maybe = UNSET
    """Something is wrong that keeps no request from a right answer."""
