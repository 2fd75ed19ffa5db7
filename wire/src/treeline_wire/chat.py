"""Chat templates: messages to prompt text as `transformers` renders them, safely.

Neither templates (from checkpoints) nor messages and `chat_template_kwargs` (from clients) are trusted. `template_env`
limits what a template can reach. Its cost is limited in one of two ways: plain templates and short requests are
rendered inline (`template_inline`, microseconds), all others by a `Renderer`: the runtime's worker processes, which are
killed at their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, Self

from jinja2.exceptions import TemplateSyntaxError

from .template_env import RaisedError, TemplateEnvironment, line_of
from .template_inline import MAX_INPUT_CHARS, MAX_INPUT_ITEMS, MAX_SECONDS, InlineTemplate, NotInlineError
from .template_inline import MAX_SOURCE_CHARS as MAX_INLINE_SOURCE_CHARS
from .tokenizer import TokenizerBundle

MAX_SOURCE_CHARS: Final = 256 << 10
"""The longest template in characters. Known ones have up to 20 thousand."""
MAX_ITEMS: Final = 200_000
"""The most values in a request, and the deepest nesting."""
MAX_DEPTH: Final = 64
_MAX_MESSAGE: Final = 500
_MAX_INT: Final = 1 << 63
# Names under which a message's reasoning is passed. The first is what templates read.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_REFUSES: Final = "the model's chat template refuses these messages"
_CANNOT: Final = (
    "the model's chat template cannot render this request: check the roles and contents of its messages, its tools, "
    "and chat_template_kwargs"
)

log = logging.getLogger(__name__)
_keys = itertools.count(1)


class TemplateError(ValueError):
    """Rendering failed. `user_error`: because of the request (400), not of the template (500).

    The text may be shown to clients: it is ours or a constant of the template, without any values.
    """

    def __init__(self, message: str, *, user_error: bool) -> None:
        self.user_error = user_error
        super().__init__(message[:_MAX_MESSAGE])


class TooLargeError(TemplateError):
    """The request is nested too deeply (`deep`) or has too many values."""

    def __init__(self, message: str, *, deep: bool) -> None:
        self.deep = deep
        super().__init__(message, user_error=True)


class TemplateBusyError(TemplateError):
    """Too many renderings at once: try again (503)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, user_error=False)


class NeedsWorkerError(Exception):
    """Needs a worker process, and there is none, or waiting for it would block an event loop."""


class Renderer(Protocol):
    """Renders slow templates; blocks. `key` identifies `source` among this process's templates."""

    def render(self, key: int, source: str, variables: dict[str, Any]) -> str:
        """The rendered text. Raises `TemplateError`."""


class ChatTemplate:
    """A chat template, parsed once. Immutable and thread-safe.

    `tool_source`: a separate template for requests with tools. `pool` renders what is not rendered inline; without it,
    that is refused. `inline_seconds`: CPU time of an inline rendering; 0 for a template from a request, which is not
    analysed here. `placeholders`: the text of each kind of item that the model reads, for templates without lists.
    Raises `TemplateError` if a source does not compile or may not run.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        pool: Renderer | None = None,
        inline_seconds: float = MAX_SECONDS,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        self.placeholders = dict(placeholders or {})
        self._special_tokens = dict(special_tokens)
        self._plain = _Source(source, pool, inline_seconds)
        self._with_tools = self._plain if tool_source is None else _Source(tool_source, pool, inline_seconds)

    @classmethod
    def from_bundle(
        cls, bundle: TokenizerBundle, pool: Renderer | None = None, inline_seconds: float = MAX_SECONDS
    ) -> Self | None:
        """The template of a bundle, or None. Raises `TemplateError`."""
        if bundle.chat_template is None:
            return None
        return cls(
            bundle.chat_template,
            special_tokens=bundle.special_tokens,
            tool_source=bundle.tool_template,
            pool=pool,
            inline_seconds=inline_seconds,
            placeholders=None if bundle.media is None else bundle.media.in_templates,
        )

    @property
    def not_inline(self) -> str | None:
        """Why requests without tools always need a worker; None if most are rendered inline."""
        return self._plain.not_inline

    def source(self, with_tools: bool) -> str:
        """The template's source for requests with or without tools."""
        return (self._with_tools if with_tools else self._plain).text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders messages as `apply_chat_template(tokenize=False)` does.

        `continue_final_message`: leaves the last message open for the model to continue; a name selects its field,
        default `content`. Excludes `add_generation_prompt`. `template_kwargs` are passed on and override special
        tokens.

        Raises `TemplateError`, and `NeedsWorkerError` if a worker is needed and there is no pool or this is the thread
        of a running event loop. In those two cases it returns within some 10 ms.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message excludes add_generation_prompt", user_error=True)
        if not messages:
            raise TemplateError("there are no messages", user_error=True)
        source = self._plain if tools is None else self._with_tools
        admission = Admission()
        chat = admission.plain([_aliased(_present(message)) for message in messages])
        variables: dict[str, Any] = admission.plain(
            {**self._special_tokens, **(template_kwargs or {}), "tools": tools, "documents": documents}
        )
        variables["messages"] = chat
        variables["add_generation_prompt"] = add_generation_prompt
        if not continue_final_message:
            return source.render(variables, admission.small)
        field = "content" if continue_final_message is True else continue_final_message
        final = _tag_final(chat, field, source.text)
        return _cut_at_tag(source.render(variables, admission.small), final)


class _Source:
    """A template and its text."""

    def __init__(self, text: str, pool: Renderer | None, inline_seconds: float) -> None:
        if len(text) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(text)} characters", user_error=False)
        self.text = text
        self.not_inline: str | None = None
        self._pool = pool
        self._inline_seconds = inline_seconds
        self._key = next(_keys)
        self._inline: InlineTemplate | None = None
        if not inline_seconds:
            self.not_inline = "it comes with a request"
            return
        try:
            self._inline = InlineTemplate(text)
        except NotInlineError as reason:
            self.not_inline = str(reason)
            _check_syntax(text)
        except (Exception, RecursionError, MemoryError) as error:
            # The worker's language may have what the inline one lacks (a filter, say).
            self.not_inline = f"{type(error).__name__}: {error}"
            _check_syntax(text)

    def render(self, variables: dict[str, Any], small: bool) -> str:
        if self._inline is not None and small:
            try:
                return self._inline.render(variables, self._inline_seconds)
            except NotInlineError as reason:
                log.debug("a worker renders a chat: %s", reason)
            except RaisedError as error:
                text = str(error)
                raise refused(text if text in self._inline.raised_texts else "") from None
            except Exception as error:
                raise failed(f"{type(error).__name__} at line {line_of(error)}") from None
        if self._pool is None or on_event_loop():
            raise NeedsWorkerError
        return self._pool.render(self._key, self.text, variables)


def on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def refused(text: str) -> TemplateError:
    """The template refused the messages. `text` is a constant of it, or "" if its words may contain values."""
    return TemplateError(text or _REFUSES, user_error=True)


def failed(where: str) -> TemplateError:
    """The template does not fit the request. `where`, for the log, has the kind of error and the line.

    The error's own text is never shown, since it contains parts of messages.
    """
    log.info("a chat template failed: %s", where)
    return TemplateError(_CANNOT, user_error=True)


def _check_syntax(text: str) -> None:
    """Refuses, cheaply, most templates that the worker would not compile."""
    if len(text) > MAX_INLINE_SOURCE_CHARS:
        return  # parsing it would take long; the worker does it, at the first request
    try:
        TemplateEnvironment().compile(text, raw=True)
    except TemplateSyntaxError as error:
        reason = f"{error.message} (line {error.lineno})"
        raise TemplateError(f"the chat template does not compile: {reason}", user_error=False) from error
    except (Exception, RecursionError, MemoryError) as error:
        raise TemplateError(f"the chat template does not compile: {error}", user_error=False) from error


class Admission:
    """Copies JSON values to plain ones and counts them; templates must never get objects of ours."""

    def __init__(self, max_depth: int = MAX_DEPTH, max_values: float = MAX_ITEMS) -> None:
        self._max_depth = max_depth
        self._max_values = max_values
        self._items = 0
        self.chars = 0

    @property
    def small(self) -> bool:
        """Whether the request is small enough to be rendered inline."""
        return self._items <= MAX_INPUT_ITEMS and self.chars <= MAX_INPUT_CHARS

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Returns a copy made of dict, list, str, int, float, bool and None. Raises `TemplateError` beyond the
        limits.
        """
        kind = type(value)
        if kind is str:
            self.chars += len(value)
            return value
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            if not -_MAX_INT <= value < 2 * _MAX_INT:
                raise TemplateError("a number of the request does not fit into 64 bits", user_error=True)
            return value
        if depth > self._max_depth:
            raise TooLargeError(f"the request is nested more than {self._max_depth} deep", deep=True)
        if kind is dict:
            self._count(len(value))
            copy = {}
            for name, item in value.items():
                if type(item) is str:  # most are
                    self.chars += len(name) + len(item)
                    copy[name] = item
                else:
                    self.chars += len(name)
                    copy[name] = self.plain(item, depth + 1)
            return copy
        if kind is list or kind is tuple:
            self._count(len(value))
            return [self.plain(item, depth + 1) for item in value]
        return f"<{kind.__name__}>"

    def _count(self, items: int) -> None:
        self._items += items
        if self._items > self._max_values:
            raise TooLargeError(f"the request has more than {self._max_values} values", deep=False)


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message without null members, which many templates cannot handle."""
    return {name: value for name, value in message.items() if value is not None}


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    for name in _REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _tag_final(chat: list[dict[str, Any]], field: str, source: str) -> str:
    """Marks the end of the text to be continued; returns that text."""
    if not chat or chat[-1].get(field) is None:
        raise TemplateError(f"the final message has no {field} to continue", user_error=True)
    message = chat[-1]
    final: Any = message[field]
    fields = [field]
    if field in _REASONING:
        fields = [name for name in _REASONING if message.get(name) == final]
    if not any(name in source for name in fields):
        raise TemplateError(f"the chat template does not use {field}", user_error=True)
    if isinstance(final, list):
        for part in reversed(final):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _TAG
                return text
        raise TemplateError("the final message has no text to continue", user_error=True)
    if not isinstance(final, str):
        raise TemplateError(f"the {field} of the final message is not a text", user_error=True)
    for name in fields:
        message[name] = final + _TAG
    return final


def _cut_at_tag(rendered: str, final: str) -> str:
    at = rendered.rfind(_TAG.strip())
    if at < 0 or final.strip() not in rendered:
        raise TemplateError("the chat template leaves out the message to be continued", user_error=True)
    if rendered.startswith(_TAG, at):
        return rendered[:at]
    return rendered[:at].rstrip()  # the template trims messages, so the tag has lost its blank
