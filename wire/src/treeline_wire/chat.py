"""Chat templates: messages to prompt text, exactly as `transformers` renders them, but bounded.

A template comes with a model, from strangers; messages come from other strangers. The template runs in `sandbox`
under a `budget`, and sees only plain copies of what it is given.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from jinja2.exceptions import SecurityError

from .budget import Budget, LimitError, Limits, current
from .sandbox import RaisedError, compile_template
from .tokenizer import TokenizerBundle

#: Characters of a template's source. Known templates have up to 20 thousand.
MAX_SOURCE_CHARS: Final = 256 << 10
_MAX_DATE_FORMAT: Final = 256
_MAX_MESSAGE: Final = 2000
# Names under which a message's reasoning is passed. The first is what templates read.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateError(ValueError):
    """Rendering failed. `user_error`: the request is at fault (a 400), not the template (a 500)."""

    def __init__(self, message: str, *, user_error: bool) -> None:
        self.user_error = user_error
        super().__init__(message[:_MAX_MESSAGE])


class ChatTemplate:
    """A compiled chat template. Immutable; may be rendered by several threads.

    `tool_source` is the template for requests with tools, where a model has a separate one. Raises
    `TemplateError` when a source does not compile or may not be run.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._special_tokens = dict(special_tokens)
        self._plain = _Source(source)
        self._with_tools = self._plain if tool_source is None else _Source(tool_source)

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle) -> "ChatTemplate | None":
        """The template of a bundle, None if it has none. Raises `TemplateError`."""
        if bundle.chat_template is None:
            return None
        return cls(
            bundle.chat_template,
            special_tokens=bundle.special_tokens,
            tool_source=bundle.tool_template,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render messages, as `apply_chat_template(tokenize=False)` does.

        `continue_final_message`: leave the last message open, so that the model goes on with it; a name says which
        field of it, `content` by default. It excludes `add_generation_prompt`. `template_kwargs` are passed on and
        win over the special tokens. Raises `TemplateError`.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message excludes add_generation_prompt", user_error=True)
        source = self._plain if tools is None else self._with_tools
        budget = Budget(self._limits)
        token = current.set(budget)
        try:
            chat = [_aliased(_present(message)) for message in messages]
            variables = {
                **self._special_tokens,
                **template_kwargs,
                "tools": tools,
                "documents": documents,
            }
            chat = budget.admit_input(chat)
            variables = budget.admit_input(variables)
            variables["add_generation_prompt"] = add_generation_prompt
            if not continue_final_message:
                return source.render(chat, variables)
            field = "content" if continue_final_message is True else continue_final_message
            final = _tag_final(chat, field, source.text)
            return _cut_at_tag(source.render(chat, variables), final)
        except LimitError as error:
            raise TemplateError(f"the chat template was stopped: {error}", user_error=False) from error
        finally:
            current.reset(token)


class _Source:
    """One template and its text."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(text)} characters", user_error=False)
        self.text = text
        try:
            self._template = compile_template(text, {"strftime_now": _strftime_now})
        except (Exception, RecursionError, MemoryError) as error:
            raise TemplateError(f"the chat template does not compile: {error}", user_error=False) from error

    def render(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Run it under the current budget."""
        if not chat:
            raise TemplateError("there are no messages", user_error=True)
        try:
            return self._template.render(messages=chat, **variables)
        except RaisedError as error:
            raise TemplateError(str(error), user_error=True) from error
        except LimitError:
            raise
        except (SecurityError, OverflowError) as error:
            raise TemplateError(f"the chat template was stopped: {error}", user_error=False) from error
        except (RecursionError, MemoryError) as error:
            raise TemplateError(
                f"the chat template was stopped: {type(error).__name__}", user_error=False
            ) from error
        except Exception as error:
            raise TemplateError(
                f"the chat template cannot render these messages: {error}", user_error=True
            ) from error


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """Members that are null are as good as absent, and many templates stumble over them."""
    return {name: value for name, value in message.items() if value is not None}


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tag_final(chat: list[dict[str, Any]], field: str, source: str) -> str:
    """Mark the end of the text that is to be continued; returns that text."""
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
        raise TemplateError(
            "the chat template leaves out the message that is to be continued", user_error=True
        )
    if rendered.startswith(_TAG, at):
        return rendered[:at]
    return rendered[:at].rstrip()  # the template trims messages, so the tag lost its blank


def _strftime_now(format: str) -> str:
    """The date, in UTC: a prompt must not depend on where it is rendered."""
    if len(format) > _MAX_DATE_FORMAT:
        raise LimitError("its date format is too long")
    return datetime.now(UTC).strftime(format)
