"""The structs of answers, like `server.answers` for the other paths."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct

from treeline_runtime.server.answers import Maybe

# ---- /v1/responses --------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponsePart(Struct):
    """A part of a message or of reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | Maybe = UNSET
    logprobs: list[Any] | Maybe = UNSET


class ResponseItem(Struct):
    """A message, a function call, or reasoning; `type` says which, and so which members are present."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: ItemStatus
    role: Literal["assistant"] | Maybe = UNSET
    content: list[ResponsePart] | Maybe = UNSET
    summary: list[Any] | Maybe = UNSET
    call_id: str | Maybe = UNSET
    name: str | Maybe = UNSET
    arguments: str | Maybe = UNSET


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails | Maybe = UNSET
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseObject(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None = None
    background: bool = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]


class ResponseEvent(Struct):
    """An event of a stream, `response.*`; `type` says which members are present."""

    type: str
    sequence_number: int
    response: ResponseObject | Maybe = UNSET
    output_index: int | Maybe = UNSET
    item: ResponseItem | Maybe = UNSET
    item_id: str | Maybe = UNSET
    content_index: int | Maybe = UNSET
    part: ResponsePart | Maybe = UNSET
    delta: str | Maybe = UNSET
    text: str | Maybe = UNSET
    name: str | Maybe = UNSET
    arguments: str | Maybe = UNSET
    logprobs: list[Any] | Maybe = UNSET


class InputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- /v1/messages ---------------------------------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """Cached tokens count separately from input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | Maybe = UNSET
    cache_creation_input_tokens: int | Maybe = UNSET
    output_tokens_details: ThinkingTokens | Maybe = UNSET
    """Set if the number is known."""


class MessageBlock(Struct):
    """A text, thinking, or a tool use; `type` says which, and so which members are present."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | Maybe = UNSET
    thinking: str | Maybe = UNSET
    signature: str | Maybe = UNSET
    id: str | Maybe = UNSET
    name: str | Maybe = UNSET
    input: dict[str, Any] | Maybe = UNSET


class Message(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageDelta(Struct):
    """More of a block, or how the message ended."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | Maybe = UNSET
    text: str | Maybe = UNSET
    thinking: str | Maybe = UNSET
    partial_json: str | Maybe = UNSET
    stop_reason: StopReason | Maybe = UNSET
    stop_sequence: str | Maybe | None = UNSET


class MessageEvent(Struct):
    """An event of a stream; `type` says which members are present."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: Message | Maybe = UNSET
    index: int | Maybe = UNSET
    content_block: MessageBlock | Maybe = UNSET
    delta: MessageDelta | Maybe = UNSET
    usage: MessageUsage | Maybe = UNSET


class TokenCount(Struct):
    input_tokens: int


class AnthropicErrorDetail(Struct):
    type: str
    message: str


class AnthropicError(Struct):
    """Any error answer of these paths, and the last event of a failed stream."""

    type: Literal["error"]
    error: AnthropicErrorDetail


# ---- /api/chat, /api/generate ---------------------------------------------------------------------------------------


class OllamaFunction(Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct):
    id: str
    function: OllamaFunction


class OllamaMessage(Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | Maybe = UNSET
    tool_calls: list[OllamaCall] | Maybe = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """A whole answer, or a line of a stream: chats have `message`, others `response` and `thinking`. The last line of a
    stream is `done`; its durations are in nanoseconds."""

    model: str
    created_at: str
    message: OllamaMessage | Maybe = UNSET
    response: str | Maybe = UNSET
    thinking: str | Maybe = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | Maybe = UNSET
    total_duration: int | Maybe = UNSET
    load_duration: int | Maybe = UNSET
    prompt_eval_count: int | Maybe = UNSET
    prompt_eval_duration: int | Maybe = UNSET
    eval_count: int | Maybe = UNSET
    eval_duration: int | Maybe = UNSET


class OllamaError(Struct):
    """Any error answer of Ollama's paths, and the last line of a failed stream."""

    error: str


# ---- /v1/audio/transcriptions ---------------------------------------------------------------------------------------


class TranscriptUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class Transcription(Struct):
    text: str
    usage: TranscriptUsage


class TranscriptDelta(Struct, tag="transcript.text.delta"):
    delta: str


class TranscriptDone(Struct, tag="transcript.text.done"):
    text: str
    usage: TranscriptUsage
