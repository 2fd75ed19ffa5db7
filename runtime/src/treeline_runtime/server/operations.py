"""What `/openapi.json` says of each path of the inference listener."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treeline_runtime.logit_processors import MAX_NAME_CHARS
from treeline_runtime.server import answers, openai, tools
from treeline_runtime.server import native_fields as native
from treeline_runtime.server import pooling_fields as pooling
from treeline_runtime.server.apis import answers as api_answers
from treeline_runtime.server.apis import anthropic_fields, responses_fields
from treeline_runtime.server.chat_reader import EFFORTS
from treeline_runtime.server.fields import NATIVE_HARMLESS
from treeline_runtime.server.schema import Body, Schema, operation

OPENAI, NATIVE, STATE = "OpenAI's API", "SGLang's API", "Probes and information"
ANTHROPIC = "Anthropic's API"
VECTORS = "Rerankers, rewards and other vectors"

MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "description": "For the model's chat template. Content in parts has parts of type `text`.",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
            "tool_calls": {
                "type": ["array", "null"],
                "description": "Of the assistant; arguments are the text of JSON.",
            },
            "tool_call_id": {"type": ["string", "null"], "description": "Which call a message of `tool` answers."},
        },
    },
}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT: Schema = {
    "description": "A text or its token ids, or several of them.",
    "anyOf": [{"type": "string"}, IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, IDS]}}],
}


def _said(names: Iterable[str], description: str, **schema: Any) -> dict[str, Schema]:
    """Fields that are alike; without a type, any value will do."""
    return {name: {"description": description, **schema} for name in names}


_SALT = _said(
    openai.NAMESPACE_FIELDS,
    "Requests that differ in this share no cached prefix.",
    type=["string", "null"],
    maxLength=openai.MAX_SALT_CHARS,
)
_FLAG = ["boolean", "null"]
_FOR_TEMPLATE = "For the chat template."
_TEMPLATE = {
    **_said(["documents"], _FOR_TEMPLATE, type=["array", "null"]),
    **_said(["add_generation_prompt", "continue_final_message"], _FOR_TEMPLATE, type=["boolean", "null"]),
    **_said(["chat_template_kwargs"], _FOR_TEMPLATE, type=["object", "null"]),
}
_GRAMMAR = "What the output must be: one of these fields at most."
_OBJECT, _TEXT, _TEXTS_OF = ["object", "null"], ["string", "null"], ["array", "null"]
_OWN_GRAMMARS = {
    **_said(["json_schema"], f"A JSON Schema. {_GRAMMAR}", type=["object", "string", "null"]),
    **_said(["regex"], f"What the whole output matches. {_GRAMMAR}", type=_TEXT),
    **_said(["ebnf"], f"A grammar in xgrammar's form, with a rule `root ::= …`. {_GRAMMAR}", type=_TEXT),
    **_said(["structural_tag"], f"xgrammar's, or SGLang's older form. {_GRAMMAR}", type=["object", "string", "null"]),
    **_said(["choice"], f"Texts, one of which is the output. {_GRAMMAR}", type=_TEXTS_OF, items={"type": "string"}),
}
_GRAMMARS = {
    **_OWN_GRAMMARS,
    **_said(["response_format"], f"OpenAI's, and type `structural_tag`. {_GRAMMAR}", type=_OBJECT),
    **_said(["structured_outputs"], f"vLLM's object. {_GRAMMAR}", type=_OBJECT),
    **{
        f"guided_{theirs}": _OWN_GRAMMARS[ours] | {"description": f"vLLM's name of `{ours}`."}
        for theirs, ours in (("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "ebnf"))
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
                "description": {"type": _TEXT},
                "parameters": {"type": _OBJECT, "description": "A JSON Schema of the arguments."},
                "strict": {"type": ["boolean", "null"], "description": "The arguments hold the schema."},
            },
        },
    },
}
_TOOLS = {
    **_said(["tools"], "What the model may call.", type=["array", "null"], items=_TOOL, maxItems=tools.MAX_TOOLS),
    **_said(
        ["tool_choice"],
        "`auto` unless it is there. An object names the function that is called, or is OpenAI's `allowed_tools`.",
        anyOf=[{"enum": ["none", "auto", "required", None]}, {"type": "object"}],
    ),
    **_said(["parallel_tool_calls"], "Whether there may be several calls; true unless it is there.", type=_FLAG),
}
_NAMED = "The logit processor, of those that the server was started with; Python is not taken."
_PARAMS = "What the logit processor is given."
_PROCESSOR = {
    **_said(["custom_logit_processor"], _NAMED, type=_TEXT, maxLength=MAX_NAME_CHARS),
    **_said(["custom_params"], _PARAMS, type=_OBJECT),
}

STREAM_OPTIONS = Body(
    struct=openai.StreamOptions, description="What the chunks of a stream have besides.", harmless=openai.STREAM_HINTS
)
CHAT_BODY = Body(
    struct=openai.ChatBody,
    description="A chat. Unset sampling values come from the checkpoint, `max_tokens` is the rest of the context.",
    others={
        **_SALT,
        **_TEMPLATE,
        **_TOOLS,
        **_GRAMMARS,
        **_PROCESSOR,
        **_said(
            ["reasoning_effort"],
            "For the chat template, whose thinking it turns on or off; ignored where it reads neither.",
            enum=[*sorted(EFFORTS), None],
        ),
        "messages": MESSAGES,
        "stream_options": {"anyOf": [STREAM_OPTIONS.reference, {"type": "null"}]},
    },
    required=("messages",),
    parts=(STREAM_OPTIONS,),
)
COMPLETION_BODY = Body(
    struct=openai.CompletionBody,
    description="Prompts to go on with. Unset sampling values come from the checkpoint, `max_tokens` is 16.",
    others={
        **_SALT,
        **_GRAMMARS,
        **_PROCESSOR,
        "prompt": PROMPT,
        "logprobs": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"enum": [None, False]}]},
        "stream_options": {"anyOf": [STREAM_OPTIONS.reference, {"type": "null"}]},
    },
    required=("prompt",),
    parts=(STREAM_OPTIONS,),
)
SAMPLING = Body(
    struct=native.NativeSampling,
    description="Unset values come from the checkpoint, `max_new_tokens` is 128.",
    others=_OWN_GRAMMARS | _PROCESSOR,
)
_OWN_SAMPLING: Schema = {"anyOf": [SAMPLING.reference, {"type": "null"}]}
GENERATE_BODY = Body(
    struct=native.GenerateBody,
    description="Either `text` or `input_ids`, of one prompt or of several; what else is a list has a value for each.",
    others={
        **_SALT,
        "sampling_params": {"anyOf": [*_OWN_SAMPLING["anyOf"], {"type": "array", "items": _OWN_SAMPLING}]},
    },
    harmless=NATIVE_HARMLESS,
    parts=(SAMPLING,),
)
TOKENIZE_BODY = Body(
    struct=native.TokenizeBody,
    description="Either `prompt` or `messages`.",
    others={**_TEMPLATE, **_TOOLS, "messages": {"anyOf": [MESSAGES, {"type": "null"}]}},
)
DETOKENIZE_BODY = Body(
    struct=native.DetokenizeBody, description="Token ids: a list, or several.", others={"tokens": PROMPT}
)
_CHAT_OR_INPUT = {**_SALT, **_TEMPLATE, "messages": {"anyOf": [MESSAGES, {"type": "null"}]}}
_INPUT = {"anyOf": [*PROMPT["anyOf"], {"type": "null"}], "description": PROMPT["description"]}
_DOCUMENT = Body(struct=pooling.DocumentBody, description="A document as an object.", harmless={})
EMBEDDING_BODY = Body(
    struct=pooling.EmbeddingBody,
    description="Texts, or their token ids. `dimensions` where the model was trained for it.",
    others={**_SALT, "input": PROMPT},
    required=("input",),
)
POOLING_BODY = Body(
    struct=pooling.PoolingBody,
    description="Either `input` or `messages`.",
    others={**_CHAT_OR_INPUT, "input": _INPUT},
)
CLASSIFY_BODY = Body(
    struct=pooling.ClassifyBody,
    description="Either `input` or `messages`. Without `use_activation: false`, probabilities.",
    others={**_CHAT_OR_INPUT, "input": _INPUT},
)
_TEXTS: list[Schema] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
_OTHER_NAMES = {
    name: {"description": f"Another name of `{ours}`.", "anyOf": _TEXTS} for name, ours in pooling.SCORE_NAMES.items()
}
SCORE_BODY = Body(
    struct=pooling.ScoreBody,
    description="A text and others, or as many of both. `instruct` where the model's chat template has a place for it.",
    others={**_SALT, **_OTHER_NAMES},
)
RERANK_BODY = Body(
    struct=pooling.RerankBody,
    description="Documents, to be sorted by relevance to a query. `top_n` is all of them unless it is there.",
    others={
        **_SALT,
        "documents": {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [{"type": "string"}, _DOCUMENT.reference]},
        },
    },
    parts=(_DOCUMENT,),
)

CHAT = operation(
    tag=OPENAI,
    summary="Answer a chat",
    body=CHAT_BODY,
    answer=answers.ChatCompletion,
    event=answers.ChatChunk,
)
COMPLETION = operation(
    tag=OPENAI,
    summary="Go on with prompts",
    body=COMPLETION_BODY,
    answer=answers.Completion,
    event=answers.Completion,
)
EMBEDDINGS = operation(tag=OPENAI, summary="Vectors of texts", body=EMBEDDING_BODY, answer=answers.Embeddings)
POOLING = operation(
    tag=VECTORS, summary="What the model makes of texts, as it is", body=POOLING_BODY, answer=answers.Pooled
)
CLASSIFY = operation(
    tag=VECTORS, summary="What a classification head says of texts", body=CLASSIFY_BODY, answer=answers.Classified
)
SCORE = operation(tag=VECTORS, summary="How relevant texts are to others", body=SCORE_BODY, answer=answers.Scores)
RERANK = operation(tag=VECTORS, summary="Documents by relevance", body=RERANK_BODY, answer=answers.Ranking)
MODELS = operation(tag=OPENAI, summary="The model that is served, as a list", answer=answers.Models)
MODEL = operation(
    tag=OPENAI,
    summary="The model",
    answer=answers.Model,
)
GENERATE = operation(
    tag=NATIVE,
    summary="Go on with prompts",
    body=GENERATE_BODY,
    answer=answers.Generated | list[answers.Generated],
    event=answers.Generated,
)
TOKENIZE = operation(tag=NATIVE, summary="Text → ids", body=TOKENIZE_BODY, answer=answers.Tokens)
DETOKENIZE = operation(tag=NATIVE, summary="Ids → text", body=DETOKENIZE_BODY, answer=answers.Text)
LOADS = operation(tag=STATE, summary="The scheduler's load, asked now")
LOAD = operation(tag=STATE, summary="Requests in flight, as vLLM tells them", answer=answers.Load)
VERSION = operation(tag=STATE, summary="Of the server", answer=answers.Version)
LIVE = operation(tag=STATE, summary="503 when a restart would help", answer=answers.Status)
READY = operation(tag=STATE, summary="200 while new requests are taken", answer=answers.Status)
WORKS = operation(tag=STATE, summary="Generates a few tokens", answer=answers.Status)
MODEL_INFO = operation(tag=STATE, summary="About the model")
SERVER_INFO = operation(tag=STATE, summary="About the server: its arguments, without secrets, and its state")
TOKENIZER = operation(tag=STATE, summary="The tokenizer and chat template, for a router that renders prompts")


# ---- chats in the words of other APIs -------------------------------------------------------------------------------

_OF_CHAT = {**_SALT, "chat_template_kwargs": _TEMPLATE["chat_template_kwargs"]}
_ONE_ANSWER: dict[str, Schema] = {"n": {"enum": [None, 1]}}

RESPONSES_BODY = Body(
    struct=responses_fields.ResponsesBody,
    description="A chat as items. Nothing is stored: the whole conversation comes with each request. Unset sampling "
    "values come from the checkpoint, `max_output_tokens` is the rest of the context.",
    others=_OF_CHAT
    | _ONE_ANSWER
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
    others=_OF_CHAT
    | _ONE_ANSWER
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
    answer=api_answers.ResponseObject,
    event=api_answers.ResponseEvent,
)
INPUT_TOKENS = operation(
    tag=OPENAI,
    summary="How many tokens the prompt of a chat has",
    body=RESPONSES_BODY,
    answer=api_answers.InputTokens,
)
MESSAGES = operation(
    tag=ANTHROPIC,
    summary="Answer a chat",
    body=MESSAGES_BODY,
    answer=api_answers.Message,
    event=api_answers.MessageEvent,
    error=api_answers.AnthropicError,
)
COUNT_TOKENS = operation(
    tag=ANTHROPIC,
    summary="How many tokens the prompt of a chat has",
    body=MESSAGES_BODY,
    answer=api_answers.TokenCount,
    error=api_answers.AnthropicError,
)
