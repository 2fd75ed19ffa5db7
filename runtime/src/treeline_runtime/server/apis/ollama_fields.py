"""Bodies of `/api/chat` and `/api/generate` → a chat's, or a completion's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType
from treeline_wire.apis import ollama
from treeline_wire.apis.conversion import Convert

from treeline_runtime.server.apis.answers import OllamaAnswer, OllamaMessage
from treeline_runtime.server.errors import unsupported
from treeline_runtime.server.fields import Body
from treeline_runtime.server.openai import new_rid
from treeline_runtime.server.sampling import Penalty, RepetitionPenalty, Seed, Share, Temperature, TopK, TopP

_LOADED: Final = "the model is loaded, with the server's settings"
_SAMPLER: Final = "Ollama's own sampler has no such step either"


class OllamaOptions(Body, frozen=True):
    """Unset values come from the checkpoint; `num_predict` is the rest of the context."""

    harmless: ClassVar = {
        **dict.fromkeys(
            (
                *("num_ctx", "num_batch", "num_gpu", "num_gqa", "main_gpu", "num_thread", "numa", "low_vram"),
                *("use_mmap", "use_mlock", "f16_kv", "vocab_only", "logits_all", "embedding_only"),
                *("rope_frequency_base", "rope_frequency_scale", "draft_num_predict"),
            ),
            _LOADED,
        ),
        "num_keep": "prompts are never truncated",
        "repeat_last_n": "penalties count the whole text",
        "penalize_newline": "penalties count the whole text",
        **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p"), _SAMPLER),
    }
    num_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


_OPTIONS: Final = {"anyOf": [{"$ref": "#/components/schemas/OllamaOptions"}, {"type": "null"}]}


class OllamaBody(Body, frozen=True, kw_only=True):
    harmless: ClassVar = {
        "keep_alive": "the model stays loaded",
        "truncate": "prompts are never truncated",
        "shift": "the context is never shifted",
    }
    shown: ClassVar = {"options": _OPTIONS}
    parts: ClassVar = (OllamaOptions,)
    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """A chat. Without messages the answer only says that the model is loaded."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """A prompt as a chat of one message, or with `raw` a text to continue."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class Api(NamedTuple):
    """One of the two paths."""

    prompt: str
    """The member with the conversation."""
    body: type[OllamaChatBody | OllamaGenerateBody]
    convert: Convert
    NAMES: Mapping[str, str]
    """A chat's fields with other names here."""
    MEMBERS: Mapping[str, str] = {}


_NAMES: Final = {
    "max_completion_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "stop": "options.stop",
    "response_format": "format",
    "reasoning_effort": "think",
}
CHAT: Final = Api("messages", OllamaChatBody, ollama.to_chat, {**_NAMES, "messages": "messages"})
GENERATE: Final = Api("prompt", OllamaGenerateBody, ollama.text_to_chat, {**_NAMES, "messages": "prompt"})


def read_ollama(raw: Mapping[str, Any], api: Api) -> tuple[OllamaBody, OllamaOptions]:
    """Raises ApiError 400."""
    body = api.body.read(raw)
    if raw.get("raw"):
        for name in ("system", "images"):
            if raw.get(name):
                raise unsupported(name, "a 'raw' prompt is the whole text")
    return body, OllamaOptions.read(raw.get("options") or {}, "options.")


def chat_fields(body: OllamaBody, options: OllamaOptions) -> dict[str, Any]:
    """Members of the chat's body that do not concern its prompt."""
    made: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "rid": new_rid("ollama"),
    }
    if body.format == "json":
        made["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    return {name: value for name, value in made.items() if value is not None}


def answer(model: str, *, chat: bool, text: str = "", thinking: str | UnsetType = UNSET, **more: Any) -> OllamaAnswer:
    """A line of a stream or a whole answer, in the form of `/api/chat` (`chat`) or `/api/generate`."""
    created = ollama.rfc3339(time.time())
    if chat:
        calls = more.pop("tool_calls", UNSET)
        said = OllamaMessage("assistant", text, thinking, calls)
        return OllamaAnswer(model=model, created_at=created, message=said, **more)
    return OllamaAnswer(model=model, created_at=created, response=text, thinking=thinking, **more)
