"""Converts an OpenAI request body to its prompt and cache namespace.

Runtime and picker share these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from .chat import ChatTemplate, TemplateError, TooLargeError
from .dialects import TREELINE, ChatDialect
from .dialects.base import Turn, check_size, flag
from .dialects.media_parts import MediaPart, media_parts
from .errors import PromptError, TooDeep
from .namespaces import join_namespace, join_salt

__all__ = [
    "MAX_KWARGS_DEPTH",
    "Prompt",
    "PromptError",
    "TooDeep",
    "beginning_of_chat",
    "namespace_of",
    "prompt_of_chat",
    "prompt_of_completion",
    "salt_of",
]

_MAX_ID: Final = 0x7FFF_FFFF
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that a template always receives; `chat_template_kwargs` may not replace them."""
MAX_KWARGS_DEPTH: Final = 16
"""`chat_template_kwargs` are switches of a template: a few names, lists and small objects."""
MAX_KWARGS_VALUES: Final = 1000
MAX_KWARGS_CHARS: Final = 64 << 10


class Prompt(Struct, frozen=True):
    """A prompt as text or as token ids; exactly one of the two is set.

    `add_special_tokens`: whether the tokenizer's post-processor adds BOS and the like to `text`. `media`: the items for
    which the text should have a placeholder each, in order; the caller checks that it does.
    """

    text: str | None = None
    ids: list[int] | None = None
    add_special_tokens: bool = True
    media: tuple[MediaPart, ...] = ()


def prompt_of_chat(body: Mapping[str, Any], template: ChatTemplate, dialect: ChatDialect = TREELINE) -> Prompt:
    """Renders the `messages` of a chat request as the engine of this dialect would.

    Reads `messages`, `tools`, `tool_choice`, `documents`, `add_generation_prompt`, `continue_final_message`,
    `chat_template_kwargs`, `reasoning_effort`, and further members that the dialect uses. Parses arguments of tool
    calls, since templates expect objects.

    Raises `PromptError` for a wrong request, `chat.TemplateError` for a faulty template, and the other errors of
    `ChatTemplate.render`.
    """
    return _rendered(body, template, dialect, dialect.turn)


def beginning_of_chat(body: Mapping[str, Any], template: ChatTemplate, dialect: ChatDialect = TREELINE) -> Prompt:
    """Renders the first messages of a longer chat; the text ends with that of the last one, whatever its role.

    Raises as `prompt_of_chat`.
    """

    def turn(body: Mapping[str, Any], source: str, placeholders: Mapping[str, str]) -> Turn:
        return Turn(dialect.messages(body.get("messages"), source, placeholders), False, True)

    return _rendered(body, template, dialect, turn)


def _rendered(
    body: Mapping[str, Any],
    template: ChatTemplate,
    dialect: ChatDialect,
    turn_of: Callable[[Mapping[str, Any], str, Mapping[str, str]], Turn],
) -> Prompt:
    shown = dialect.tools(body)
    turn = turn_of(body, template.source(shown is not None), template.placeholders)
    kwargs = dialect.variables(body, _template_kwargs(body))
    documents = dialect.documents(body)

    def render(tools: list[dict[str, Any]] | None) -> str:
        return template.render(
            turn.messages,
            tools=tools,
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
            documents=documents,
            template_kwargs=kwargs,
        )

    try:
        try:
            text = render(shown)
        except TooLargeError:
            raise
        except TemplateError as error:
            if shown is None or not dialect.flat_tools or not error.user_error:
                raise
            text = render([tool["function"] for tool in shown])
    except TooLargeError as error:
        if error.deep:
            _name_the_deep_one(body)
        raise PromptError("messages", str(error)) from error
    except TemplateError as error:
        if error.user_error:
            raise PromptError("messages", str(error)) from error
        raise
    text = _encodable(text + turn.suffix, "messages")
    media = tuple(media_parts(body["messages"], template.placeholders)) if template.placeholders else ()
    return Prompt(text=text, add_special_tokens=dialect.add_special_tokens(body), media=media)


def prompt_of_completion(body: Mapping[str, Any]) -> list[Prompt]:
    """Returns the prompts of a completion request. `prompt` is a text, a list of texts, ids, or a list of lists of ids.

    Raises `PromptError`.
    """
    value = body.get("prompt")
    add_special = flag(body, "add_special_tokens", True)
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
    """Returns the cache namespace of a request: from `lora_path`, `cache_salt`, `extra_key`, and the client if caches
    are isolated.

    None without any of them. Raises `PromptError`.
    """
    return join_namespace(_optional_text(body, "lora_path"), salt_of(body), client)


def salt_of(body: Mapping[str, Any]) -> str | None:
    """Returns the caller's salt: `cache_salt` and `extra_key` joined. Raises `PromptError`."""
    return join_salt(_optional_text(body, "cache_salt"), _optional_text(body, "extra_key"))


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get("chat_template_kwargs")
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise PromptError("chat_template_kwargs", "must be an object")
    if check_size(value, "chat_template_kwargs", MAX_KWARGS_DEPTH, MAX_KWARGS_VALUES) > MAX_KWARGS_CHARS:
        raise PromptError("chat_template_kwargs", f"must not be longer than {MAX_KWARGS_CHARS} characters")
    clash = _RESERVED.intersection(value)
    if clash:
        raise PromptError("chat_template_kwargs", f"must not contain {', '.join(sorted(clash))}")
    return value


def _name_the_deep_one(body: Mapping[str, Any]) -> None:
    """Raises `TooDeep` for template input that is nested too deeply."""
    for i, message in enumerate(body["messages"]):
        for name, member in message.items():
            check_size(member, f"messages[{i}].{name}")
    for param in ("tools", "documents", "reasoning_effort"):
        check_size(body.get(param), param)


def _optional_text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise PromptError(name, "must be a string")
    return value if value is None else _encodable(value, name)


def _ids(value: list[Any]) -> list[int]:
    """Checks token ids. JSON has one kind of number: 5.0 is 5."""
    if not value:
        raise PromptError("prompt", "must not be empty")
    if any(isinstance(item, float) for item in value):
        value = [int(item) if isinstance(item, float) and item.is_integer() else item for item in value]
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_ID:
            raise PromptError("prompt", "token ids must be non-negative integers")
    return value


def _encodable(text: str, param: str) -> str:
    """Refuses lone surrogates, which JSON can express but UTF-8 and tokenizers cannot."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError(param, "contains half of a surrogate pair") from None
    return text
