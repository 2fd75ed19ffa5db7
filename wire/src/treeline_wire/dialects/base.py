"""The base of all dialects: reading messages, parts and tool calls from clients."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from ..chat import MAX_DEPTH, Admission, TemplateError, TooLargeError
from ..errors import PromptError, TooDeep
from .content_format import takes_lists
from .media_parts import kind_of

Message = dict[str, Any]
_NONE: Final = ("", None)
_WITHOUT_MEDIA: Final = ("system", "developer")


class Turn(Struct, frozen=True):
    """The conversation for a template. `suffix` is appended to its output."""

    messages: list[Message]
    add_generation_prompt: bool
    continue_final_message: bool
    suffix: str = ""


class ChatDialect(ABC):
    """One engine's way from a chat request's body to its template's arguments.

    Stateless. Methods raise `PromptError` where the engine would refuse the request, and do not change the body.
    """

    separator: str
    """Between text parts of a message, for templates that take texts."""
    flat_tools: bool = False
    """If the template fails, tries again with tools without OpenAI's wrapper."""

    def takes_lists(self, source: str) -> bool:
        """Whether this template takes content as lists of parts."""
        return takes_lists(source)

    def turn(self, body: Mapping[str, Any], source: str, placeholders: Mapping[str, str]) -> Turn:
        """The chat of a request. `source` is the template's text; `placeholders`: the text for each kind of item that
        the model reads."""
        messages = self.messages(body.get("messages"), source, placeholders)
        continue_final = flag(body, "continue_final_message", False)
        add_generation = flag(body, "add_generation_prompt", not continue_final)
        if continue_final and add_generation:
            raise PromptError("continue_final_message", "cannot be combined with add_generation_prompt")
        return Turn(messages, add_generation, continue_final)

    def messages(self, value: Any, source: str, placeholders: Mapping[str, str]) -> list[Message]:
        """The messages as the template receives them."""
        if not isinstance(value, list) or not value:
            raise PromptError("messages", "must be a non-empty list")
        lists = self.takes_lists(source)
        return [self._message(item, f"messages[{i}]", lists, placeholders) for i, item in enumerate(value)]

    def _message(self, value: Any, where: str, lists: bool, placeholders: Mapping[str, str]) -> Message:
        if not isinstance(value, dict):
            raise PromptError(where, "must be an object")
        role = value.get("role")
        if not isinstance(role, str):
            raise PromptError(f"{where}.role", "must be a string")
        content = value.get("content")
        if isinstance(content, list):
            check_size(content, f"{where}.content")
            kinds = [kind_of(part, placeholders) for part in content]
            if any(kinds) and role in _WITHOUT_MEDIA:
                raise PromptError(f"{where}.content", f"only texts are supported in {role} messages")
            texts = [
                self.part(part, f"{where}.content[{i}]") if kind is None else placeholders[kind]
                for i, (kind, part) in enumerate(zip(kinds, content, strict=True))
            ]
            # Templates seldom expect a list as a tool's result, so both engines give them a text.
            if lists and (role != "tool" or any(kinds)):
                each = zip(content, kinds, texts, strict=True)
                content = [
                    self.text_part(part, text) if kind is None else {"type": kind}
                    for part, kind, text in each
                    if text is not None
                ]
            else:
                content = self.joined(texts)
        elif content is None:
            content = self.nothing(lists and role != "tool")
        elif not isinstance(content, str):
            raise PromptError(f"{where}.content", "must be a string or a list of parts")
        else:
            content = self.text(content, lists and role != "tool")
        return self.members(value, content, where)

    def nothing(self, as_list: bool) -> Any:
        """The value for null or absent content."""
        del as_list
        return ""

    def text(self, text: str, as_list: bool) -> Any:
        """The value for text content."""
        del as_list
        return text

    def joined(self, texts: list[str | None]) -> str:
        """A message's parts joined to one text."""
        return self.separator.join(text for text in texts if text is not None)

    def text_part(self, part: Any, text: str) -> dict[str, Any]:
        """A part with this text, for a template that accepts lists."""
        del part
        return {"type": "text", "text": text}

    @abstractmethod
    def part(self, value: Any, where: str) -> str | None:
        """The text of a part; None if the engine drops it."""

    @abstractmethod
    def members(self, message: Message, content: Any, where: str) -> Message:
        """A message with the members that the engine passes on, in its order."""

    @abstractmethod
    def tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The tools that the template receives."""

    @abstractmethod
    def variables(self, body: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Further variables of the template; `given` are `chat_template_kwargs`."""

    def documents(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The documents that the template receives."""
        return objects(body.get("documents"), "documents")

    def add_special_tokens(self, body: Mapping[str, Any]) -> bool:
        """Whether special tokens such as BOS are put before the rendered text."""
        del body
        return False


def arguments_of(text: str, where: str) -> Any:
    """A call's arguments as an object: templates write the JSON themselves, while OpenAI's API sends a text."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise PromptError(f"{where}.function.arguments", "must be JSON") from None
    check_size(arguments, f"{where}.function.arguments")
    return arguments


def calls_of(message: Message, where: str) -> list[Any] | None:
    """A message's tool calls, checked to be a list of objects; None if there are none."""
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list):
        raise PromptError(f"{where}.tool_calls", "must be a list")
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise PromptError(f"{where}.tool_calls[{i}]", "must be an object")
    return calls


def text_of(part: Any, where: str, kinds: Mapping[str, str]) -> str | None:
    """The text of a part; `kinds` maps its type to the member with the text. None if that member is null."""
    if not isinstance(part, dict):
        raise PromptError(where, "must be an object")
    kind = part.get("type", "text")
    member = kinds.get(kind) if isinstance(kind, str) else None
    if member is None:
        raise PromptError(where, "only parts of type 'text' are supported")
    text = part.get(member)
    if text is not None and not isinstance(text, str):
        raise PromptError(where, f"`{member}` must be a string")
    return text


def with_system_for_developer(messages: list[Message], source: str, separator: str) -> list[Message]:
    """For templates without the role `developer`: its messages become system messages, merged at the beginning, where
    many templates require them."""
    named = any(message["role"] == "developer" for message in messages)
    if not named or '"developer"' in source or "'developer'" in source:
        return messages
    kept = [message for message in messages if message["role"] not in ("developer", "system")]
    system = [message for message in messages if message["role"] in ("developer", "system")]
    if len(system) == 1 and messages[0] is system[0]:
        own = {name: value for name, value in system[0].items() if name != "tools"}
        return [{**own, "role": "system"}, *kept]
    texts = [_flat(message["content"], separator) for message in system]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text not in _NONE)}, *kept]


def _flat(content: Any, separator: str) -> str:
    if isinstance(content, list):
        return separator.join(part["text"] for part in content)
    return str(content)


def objects(value: Any, param: str) -> list[dict[str, Any]] | None:
    """A list of objects, or None. Raises `PromptError`."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptError(param, "must be a list of objects")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean member. Raises `PromptError`."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PromptError(name, "must be true or false")
    return value


def check_size(value: Any, param: str, max_depth: int = MAX_DEPTH, max_values: float = math.inf) -> int:
    """Returns the number of its characters. Raises `TooDeep` and `PromptError` beyond the limits."""
    admission = Admission(max_depth, max_values)
    try:
        admission.plain(value, 1)
    except TooLargeError as error:
        if error.deep:
            raise TooDeep(param, f"is nested more than {max_depth} levels deep") from None
        raise PromptError(param, f"must not have more than {max_values} values") from None
    except TemplateError as error:  # NaN or infinity
        raise PromptError(param, str(error)) from None
    return admission.chars
