"""Chat templates whose plain chats are joined instead of rendered, which takes a tenth of the time.

A plain chat has only roles and texts. When a sequence of roles comes for the second time, the text that the template
writes around the chat's texts is learnt (`treeline_wire.template_trace`) and compared with a rendering at once; it is
used for texts that meet its conditions. One in `CHECK_EVERY` joined chats is rendered, too; after the first difference
the template is always rendered.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, structs
from treeline_wire.chat import ChatTemplate, NeedsWorkerError, TemplateError
from treeline_wire.template_inline import MAX_CHARS, MAX_SECONDS
from treeline_wire.template_trace import MAX_TEXTS, DependsOnTextError, Trace, TracedTemplate, has_mark, watched

from treeline_epp.keyers.base import Owner, Shares

CHECK_EVERY: Final = 512
MAX_SHAPES: Final = 1024
"""Most sequences of roles that are remembered, of all clients. One client's chats make no other's faster."""
_MAX_NAME: Final = 32
_MAX_KWARGS: Final = 8
_BARE: Final = ("role", "content")
_PART: Final = ("type", "text")

log = logging.getLogger(__name__)

Shape = tuple[bool, tuple[tuple[str, Any], ...], tuple[str, ...], tuple[bool, ...]]
"""Whether the chat asks for an answer, the template's switches, the roles, and which texts are a list of one part."""


class _Joint(Struct, frozen=True):
    """A trace, ready for use: `stripped` and the entries of `without` in order."""

    trace: Trace
    in_order: bool
    stripped: tuple[int, ...]
    without: tuple[tuple[str, tuple[int, ...]], ...]


class LearntTemplate(ChatTemplate):
    """A chat template that joins chats if possible, and renders the others. For one thread.

    `joined` counts the joined chats, `differed` is whether a check ever found a difference. Raises as `ChatTemplate`.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], inline_seconds: float = MAX_SECONDS, **more: Any
    ) -> None:
        super().__init__(source, special_tokens=special_tokens, inline_seconds=inline_seconds, **more)
        self.joined = 0
        self.differed = False
        self._seconds = inline_seconds
        self.client: Owner = None
        """The client whose chats are rendered from now on."""
        self._shapes: Shares[Shape, _Joint | None] = Shares(MAX_SHAPES)
        self._seen: Shares[int, None] = Shares(MAX_SHAPES)
        self._traced: TracedTemplate | None = None
        if self.not_inline is None and not any(map(has_mark, special_tokens.values())):
            try:
                self._traced = TracedTemplate(source)
            except Exception as error:  # any error of Jinja: the rendering does not depend on the trace
                log.debug("a chat template is not traced: %s", type(error).__name__)

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
        """Render as `ChatTemplate.render` does."""

        def rendered() -> str:
            return ChatTemplate.render(
                self,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                documents=documents,
                template_kwargs=template_kwargs,
            )

        if self._traced is None or tools is not None or documents is not None or continue_final_message:
            return rendered()
        plain = _plain(messages, add_generation_prompt, template_kwargs or {})
        if plain is None:
            return rendered()
        text = self._join(*plain)
        if text is None:
            text = rendered()
            self._learn(*plain, text)
        elif self.joined % CHECK_EVERY == 0:
            return self._checked(text, rendered)
        return text

    def _checked(self, text: str, render: Callable[[], str]) -> str:
        """Return the rendering, or the joined text if that takes too long; any other error counts as a difference."""
        try:
            rendered = render()
        except NeedsWorkerError:
            return text
        except TemplateError:
            self._give_up()
            raise
        if rendered != text:
            self._give_up()
        return rendered

    def _give_up(self) -> None:
        self._traced, self.differed = None, True
        self._shapes = Shares(MAX_SHAPES)
        log.error(
            "joining chats of a chat template gave another prompt than rendering: its chats are rendered from now on"
        )

    def _join(self, shape: Shape, texts: list[str]) -> str | None:
        """Return the joined chat; None if its shape is unknown, or does not hold for these texts."""
        joint = self._shapes.of(self.client).get(shape)
        if joint is None or not self._holds(joint, texts):
            return None
        self.joined += 1
        return _joined(joint, texts)

    def _holds(self, joint: _Joint, texts: list[str]) -> bool:
        for at in joint.stripped:
            text = texts[at]
            if not text or text[0].isspace() or text[-1].isspace():
                return False
        for needle, places in joint.without:
            for at in places:
                if needle in texts[at]:
                    return False
        traced = self._traced
        return traced is not None and all(traced.date(each) == said for each, said in joint.trace.dates.items())

    def _learn(self, shape: Shape, texts: list[str], rendered: str) -> None:
        """Trace a shape that was seen before; keep the result, which may be None."""
        own = self._shapes.of(self.client)
        known = own.get(shape)
        if known is not None and not self._is_dated(known):
            return
        if known is None:
            if shape in own:
                return
            seen = hash(shape)
            if seen not in self._seen.of(self.client):
                self._seen.put(self.client, seen, None)
                return
            self._seen.drop(self.client, seen)
        joint = self._trace(shape)
        if joint is not None and self._holds(joint, texts) and _joined(joint, texts) != rendered:
            joint = None
        asks, kwargs, roles, lists = shape  # long chats share their pieces
        self._shapes.put(self.client, (asks, kwargs, tuple(map(sys.intern, roles)), lists), joint)

    def _is_dated(self, joint: _Joint) -> bool:
        traced = self._traced
        return traced is not None and any(traced.date(each) != said for each, said in joint.trace.dates.items())

    def _trace(self, shape: Shape) -> _Joint | None:
        asks, kwargs, roles, lists = shape
        messages = []
        for number, (role, listed) in enumerate(zip(roles, lists, strict=True)):
            text = watched(number)
            messages.append({"role": role, "content": [{"type": "text", "text": text}] if listed else text})
        variables = {**self._special_tokens, **dict(kwargs), "tools": None, "documents": None}
        variables |= {"messages": messages, "add_generation_prompt": asks}
        assert self._traced is not None
        try:
            trace = self._traced.trace(variables, self._seconds)
        except DependsOnTextError:
            return None
        except Exception as error:  # an error of the template; a rendering reports it
            log.debug("a chat template was not traced: %s", type(error).__name__)
            return None
        without = tuple((needle, tuple(sorted(places))) for needle, places in trace.without.items())
        in_order = trace.order == tuple(range(len(roles)))
        trace = structs.replace(trace, constants=tuple(map(sys.intern, trace.constants)))
        return _Joint(trace, in_order, tuple(sorted(trace.stripped)), without)


def _joined(joint: _Joint, texts: list[str]) -> str:
    constants = joint.trace.constants
    pieces = [""] * (2 * len(constants) - 1)
    pieces[::2] = constants
    pieces[1::2] = texts if joint.in_order else [texts[at] for at in joint.trace.order]
    return "".join(pieces)


def _plain(
    messages: Sequence[Mapping[str, Any]], asks: bool, kwargs: Mapping[str, Any]
) -> tuple[Shape, list[str]] | None:
    """Return the shape and the texts of a plain chat; None for another one, or one too large to render here."""
    if len(messages) > MAX_TEXTS or len(kwargs) > _MAX_KWARGS:
        return None
    for name, value in kwargs.items():
        if len(name) > _MAX_NAME or not (value is None or type(value) is bool or _is_name(value)):
            return None
    roles: list[str] = []
    lists: list[bool] = []
    texts: list[str] = []
    size = 0
    for message in messages:
        usual = len(message) == 2 and next(iter(message)) == "role"  # a template may write members in their order
        if not usual and tuple(name for name, value in message.items() if value is not None) != _BARE:
            return None
        role, content = message.get("role"), message.get("content")
        listed = type(content) is list
        if listed:
            content = _only_text(content)
        if type(content) is not str or type(role) is not str or not _is_name(role):
            return None
        size += len(content)
        texts.append(content)
        roles.append(role)
        lists.append(listed)
    shape = (asks, tuple(kwargs.items()), tuple(roles), tuple(lists))
    return (shape, texts) if size <= MAX_CHARS else None


def _only_text(parts: Any) -> str | None:
    part = parts[0] if len(parts) == 1 else None
    if type(part) is dict and tuple(part) == _PART and part["type"] == "text" and type(part["text"]) is str:
        return part["text"]
    return None


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_NAME and value.isascii()
