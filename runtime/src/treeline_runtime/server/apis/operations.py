"""What `/openapi.json` says of the other chat APIs."""

from __future__ import annotations

from typing import Final

from treeline_runtime.server.apis import answers, anthropic_fields, responses_fields
from treeline_runtime.server.openai import MAX_SALT_CHARS, NAMESPACE_FIELDS
from treeline_runtime.server.schema import Body, Schema, operation

OPENAI, ANTHROPIC = "OpenAI's API", "Anthropic's API"

_OTHERS: Final[dict[str, Schema]] = {
    **{
        name: {
            "description": "Requests that differ in this share no cached prefix.",
            "type": ["string", "null"],
            "maxLength": MAX_SALT_CHARS,
        }
        for name in sorted(NAMESPACE_FIELDS)
    },
    "chat_template_kwargs": {"description": "For the chat template.", "type": ["object", "null"]},
}
_N: Final[Schema] = {"n": {"enum": [None, 1]}}

RESPONSES_BODY = Body(
    struct=responses_fields.ResponsesBody,
    description="A chat as items. Nothing is stored: the whole conversation comes with each request. Unset sampling "
    "values come from the checkpoint, `max_output_tokens` is the rest of the context.",
    others=_OTHERS
    | _N
    | {
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "previous_response_id": {"description": "Nothing is stored.", "type": "null"},
        "structured_outputs": {"description": "vLLM's object: what the answer must be.", "type": ["object", "null"]},
        "tool_choice": {"anyOf": [{"enum": [None, "none", "auto", "required"]}, {"type": "object"}]},
    },
    required=("input",),
    harmless=responses_fields.RESPONSES_HARMLESS,
)
MESSAGES_BODY = Body(
    struct=anthropic_fields.MessagesBody,
    description="A chat. Where `max_tokens` is more than the context has room for, the answer may fill it.",
    others=_OTHERS
    | _N
    | {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
                },
            },
        },
        "max_tokens": {"type": "integer", "minimum": 1, "description": "`count_tokens` needs none."},
        "stop": {"description": "Called `stop_sequences` here.", "enum": [None, "", []]},
    },
    required=("messages",),
    harmless=anthropic_fields.MESSAGES_HARMLESS,
)

RESPONSES = operation(
    tag=OPENAI,
    summary="Answer a chat, as items",
    body=RESPONSES_BODY,
    answer=answers.ResponseObject,
    event=answers.ResponseEvent,
)
INPUT_TOKENS = operation(
    tag=OPENAI,
    summary="How many tokens the prompt of a chat has",
    body=RESPONSES_BODY,
    answer=answers.InputTokens,
)
MESSAGES = operation(
    tag=ANTHROPIC,
    summary="Answer a chat",
    body=MESSAGES_BODY,
    answer=answers.Message,
    event=answers.MessageEvent,
    error=answers.AnthropicError,
)
COUNT_TOKENS = operation(
    tag=ANTHROPIC,
    summary="How many tokens the prompt of a chat has",
    body=MESSAGES_BODY,
    answer=answers.TokenCount,
    error=answers.AnthropicError,
)
