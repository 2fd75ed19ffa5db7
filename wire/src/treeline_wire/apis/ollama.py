"""Ollama's `/api/chat` and `/api/generate` as the chat completion that our runtime makes of them, and its names of
models.

https://docs.ollama.com/api. Like Ollama, a last message of the assistant is continued. Texts of `/api/generate` with
`raw` are no chats: they are completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from ..dialects.base import check_size
from ..errors import PromptError
from .conversion import PASSED, Context, Conversation, Message, Unknown, begins_answer, text_member, tools_of

LATEST: Final = ":latest"
"""The tag that clients add to a model's name without one."""
IMAGE_URL: Final = "data:image/*;base64,"
"""Before an image, whose type Ollama does not name."""


def to_chat(body: Mapping[str, Any], messages: list[Any], context: Context) -> Conversation:
    """Converts a request to `/api/chat` with these messages to a chat. Raises `PromptError`."""
    made: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
    if context.engine != "treeline":
        return Conversation({**made, "messages": []}, Unknown("messages", "only Treeline's conversion is known"))
    chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if begins_answer(chat):
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools := tools_of(body):
        made["tools"] = tools
    think = body.get("think")
    if isinstance(think, bool):
        made["chat_template_kwargs"] = {"thinking": think, "enable_thinking": think}
    elif think is not None:
        made["reasoning_effort"] = think
    return Conversation({**made, "messages": chat})


def text_to_chat(body: Mapping[str, Any], messages: list[Any], context: Context) -> Conversation:
    """Converts a request to `/api/generate` without `raw` to a chat; `messages`: its prompt as one. Raises
    `PromptError`."""
    system = text_member(dict(body), "system", "body")
    said = [{**message, "images": body.get("images")} for message in messages]
    return to_chat(body, [*([{"role": "system", "content": system}] if system else ()), *said], context)


def without_tag(model: str, serves: Callable[[str], bool]) -> str:
    """The name of a model without `:latest`, unless a model has just this name."""
    return model.removesuffix(LATEST) if model.endswith(LATEST) and not serves(model) else model


def rfc3339(time: float) -> str:
    """A time in Unix seconds as Ollama writes it."""
    return datetime.fromtimestamp(time, UTC).isoformat()


def listed(models: Iterable[str], since: float) -> dict[str, Any]:
    """The answer to `/api/tags`. `since`: in Unix seconds. Sizes and digests are not known here."""
    return {
        "models": [
            {"name": name, "model": name, "modified_at": rfc3339(since), "size": 0, "digest": "", "details": DETAILS}
            for name in models
        ]
    }


DETAILS: Final[Mapping[str, Any]] = {
    "parent_model": "",
    "format": "safetensors",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(where, "must be an object with a role")
    content: Any = text_member(message, "content", where)
    images = message.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise PromptError(f"{where}.images", "must be a list of texts in base64")
    if images:
        parts = [{"type": "image_url", "image_url": {"url": IMAGE_URL + image}} for image in images]
        content = [*parts, {"type": "text", "text": content}]
    made: Message = {"role": message["role"], "content": content}
    if thinking := text_member(message, "thinking", where):
        made["reasoning"] = thinking
    if message.get("tool_calls"):
        made["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    for theirs, ours in (("tool_name", "name"), ("tool_call_id", "tool_call_id")):
        if message.get(theirs) is not None:
            made[ours] = text_member(message, theirs, where)
    return made


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, as templates get them."""
    if not isinstance(calls, list):
        raise PromptError(where, "must be a list")
    made = list[dict[str, Any]]()
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments", {}), dict):
            raise PromptError(f"{where}[{i}].function", "must have a name, and arguments that are an object")
        check_size(function.get("arguments", {}), f"{where}[{i}].function.arguments")
        called = {"name": function.get("name"), "arguments": function.get("arguments", {})}
        made.append({"type": "function", "function": called} | ({"id": call["id"]} if call.get("id") else {}))
    return made
