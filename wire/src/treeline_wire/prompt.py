"""From an OpenAI request body to the prompt that it stands for and the namespace it is cached in.

The functions that runtime and picker agree on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from .chat import MAX_DEPTH, Admission, ChatTemplate, TemplateError, TooLargeError
from .namespaces import join_namespace, join_salt

_MAX_ID: Final = 0x7FFF_FFFF
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that a template is called with anyway; `chat_template_kwargs` may not replace them."""
MAX_KWARGS_DEPTH: Final = 16
"""`chat_template_kwargs` are switches for a template: a few names, lists and small objects."""
MAX_KWARGS_VALUES: Final = 1000
MAX_KWARGS_CHARS: Final = 64 << 10


class PromptError(ValueError):
    """A request that cannot be turned into a prompt: a 400. `param` names the offending member of the body."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(message)


class TooDeep(PromptError):
    """Objects and lists nested beyond what any template could mean; nothing that renders or prints them is safe."""


class Prompt(Struct, frozen=True):
    """A prompt as text or as token ids; exactly one of the two is set.

    `add_special_tokens`: whether the tokenizer's post-processor adds BOS and the like to `text`.
    """

    text: str | None = None
    ids: list[int] | None = None
    add_special_tokens: bool = True


def prompt_of_chat(body: Mapping[str, Any], template: ChatTemplate) -> Prompt:
    """Render the `messages` of a chat request.

    Read members: `messages`, `tools` (left out when `tool_choice` is "none"), `documents`, `add_generation_prompt`,
    `continue_final_message`, `chat_template_kwargs`, `reasoning_effort`. Text parts of a message are joined with a
    newline; arguments of tool calls are parsed, since templates expect objects.

    Raises `PromptError` for what the client did, `chat.TemplateError` where the template itself is at fault, and what
    else `ChatTemplate.render` raises.
    """
    try:
        text = template.render(**_arguments(body))
    except TooLargeError as error:
        if error.deep:
            _name_the_deep_one(body)
        raise PromptError("messages", str(error)) from error
    except TemplateError as error:
        if error.user_error:
            raise PromptError("messages", str(error)) from error
        raise
    return Prompt(text=_encodable(text, "messages"), add_special_tokens=False)


def _arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """What `ChatTemplate.render` is given. Raises `PromptError`, and `TemplateError` for what no template takes."""
    messages = _messages(body.get("messages"))
    continue_final = _flag(body, "continue_final_message", False)
    add_generation = _flag(body, "add_generation_prompt", not continue_final)
    if continue_final and add_generation:
        raise PromptError("continue_final_message", "cannot be combined with add_generation_prompt")
    tools = _objects(body.get("tools"), "tools")
    if tools and body.get("tool_choice") == "none":
        _check_size(tools, "tools")  # a template does not get them, but an engine does
        tools = None
    return {
        "messages": messages,
        "tools": tools or None,
        "add_generation_prompt": add_generation,
        "continue_final_message": continue_final,
        "documents": _objects(body.get("documents"), "documents"),
        "template_kwargs": _template_kwargs(body),
    }


def prompt_of_completion(body: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a completion request: `prompt` is a text, a list of texts, ids, or a list of lists of ids.

    Raises `PromptError`.
    """
    value = body.get("prompt")
    add_special = _flag(body, "add_special_tokens", True)
    if isinstance(value, str):
        return [Prompt(text=_encodable(value, "prompt"), add_special_tokens=add_special)]
    if not isinstance(value, list):
        raise PromptError("prompt", "must be a string, a list of strings, or token ids")
    if not value:
        raise PromptError("prompt", "must not be an empty list")
    if all(isinstance(item, str) for item in value):
        return [Prompt(text=_encodable(item, "prompt"), add_special_tokens=add_special) for item in value]
    if all(isinstance(item, list) for item in value):
        return [Prompt(ids=_ids(item), add_special_tokens=False) for item in value]
    return [Prompt(ids=_ids(value), add_special_tokens=False)]


def namespace_of(body: Mapping[str, Any], client: str | None = None) -> str | None:
    """The namespace in which the request's prefix is cached: its `lora_path`, `cache_salt` and `extra_key`, and the
    client whose cache is kept apart, if there is one.

    None when there is none of them. Raises `PromptError`.
    """
    return join_namespace(_optional_text(body, "lora_path"), salt_of(body), client)


def salt_of(body: Mapping[str, Any]) -> str | None:
    """The caller's own salt: `cache_salt` and `extra_key` in one. Raises `PromptError`."""
    return join_salt(_optional_text(body, "cache_salt"), _optional_text(body, "extra_key"))


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise PromptError("messages", "must be a non-empty list")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PromptError(where, "must be an object")
    if not isinstance(value.get("role"), str):
        raise PromptError(f"{where}.role", "must be a string")
    message = dict(value)
    content = message.get("content")
    if isinstance(content, list):
        _check_size(content, f"{where}.content")  # a template gets the text of it alone
        message["content"] = "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise PromptError(f"{where}.content", "must be a string or a list of parts")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise PromptError(f"{where}.tool_calls", "must be a list")
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise PromptError(where, "must be an object")
    text = value.get("text")
    if value.get("type", "text") != "text" or not isinstance(text, str):
        raise PromptError(where, "only parts of type 'text' are supported")
    return text


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so the text that OpenAI's API carries becomes an object."""
    if not isinstance(value, dict):
        raise PromptError(where, "must be an object")
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return value
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise PromptError(f"{where}.function.arguments", "must be JSON") from None
    _check_size(arguments, f"{where}.function.arguments")
    return {**value, "function": {**function, "arguments": arguments}}


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get("chat_template_kwargs")
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise PromptError("chat_template_kwargs", "must be an object")
    if _check_size(value, "chat_template_kwargs", MAX_KWARGS_DEPTH, MAX_KWARGS_VALUES) > MAX_KWARGS_CHARS:
        raise PromptError("chat_template_kwargs", f"must not be longer than {MAX_KWARGS_CHARS} characters")
    clash = _RESERVED.intersection(value)
    if clash:
        raise PromptError("chat_template_kwargs", f"must not contain {', '.join(sorted(clash))}")
    effort = body.get("reasoning_effort")
    return value if effort is None else {"reasoning_effort": effort, **value}


def _check_size(value: Any, param: str, max_depth: int = MAX_DEPTH, max_values: float = math.inf) -> int:
    """Its characters. Raises `TooDeep` and `PromptError` beyond the limits: the nesting is the client's."""
    admission = Admission(max_depth, max_values)
    try:
        admission.plain(value, 1)
    except TooLargeError as error:
        if error.deep:
            raise TooDeep(param, f"is nested more than {max_depth} levels deep") from None
        raise PromptError(param, f"must not have more than {max_values} values") from None
    return admission.chars


def _name_the_deep_one(body: Mapping[str, Any]) -> None:
    """Raises `TooDeep` for what is nested too deeply of what a template is given."""
    for i, message in enumerate(body["messages"]):
        for name, member in message.items():
            _check_size(member, f"messages[{i}].{name}")
    for param in ("tools", "documents", "reasoning_effort"):
        _check_size(body.get(param), param)


def _objects(value: Any, param: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptError(param, "must be a list of objects")
    return value


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PromptError(name, "must be true or false")
    return value


def _optional_text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise PromptError(name, "must be a string")
    return value if value is None else _encodable(value, name)


def _ids(value: list[Any]) -> list[int]:
    """The ids. JSON has one kind of number: 5.0 is 5."""
    if not value:
        raise PromptError("prompt", "must not be empty")
    if any(isinstance(item, float) for item in value):
        value = [int(item) if isinstance(item, float) and item.is_integer() else item for item in value]
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_ID:
            raise PromptError("prompt", "token ids must be non-negative integers")
    return value


def _encodable(text: str, param: str) -> str:
    """Lone surrogates can be written in JSON but have no UTF-8, so no tokenizer takes them."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError(param, "contains half of a surrogate pair") from None
    return text
