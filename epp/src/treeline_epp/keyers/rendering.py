"""Rendering chats in the event loop, where nobody may wait for long.

A template may take time that grows with the square of the messages (one that looks ahead for the results of each tool
call does). So a rendering has 3 ms of the processor. One that takes longer is given up, and the chat's beginning is
rendered instead, a quarter of its messages; how many fit is remembered for the template's next chats, and grows again
while they take a small part of their time. The key of a beginning is the beginning of the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from treeline_wire.apis.conversion import takes_inline_system
from treeline_wire.chat import ChatTemplate, NeedsWorkerError
from treeline_wire.dialects import ChatDialect, dialect_of
from treeline_wire.prompt import Prompt, beginning_of_chat, prompt_of_chat

MAX_MESSAGES: Final = 256
"""Messages that a template is given; rendering costs by each."""
RENDER_SECONDS: Final = 0.003
_MIN_MESSAGES: Final = 16
"""So few are always tried; where they take too long, it is not for their number."""
_SMALL_PART: Final = 0.4
"""Half as many messages more take at most 2.25 times as long, where time grows with their square."""


class BoundedRenderer:
    """Renders the chats of one template. `most` is how many messages a rendering is given; `clock` is the processor's
    time, in seconds."""

    def __init__(self, template: ChatTemplate, clock: Callable[[], float] = time.thread_time) -> None:
        self.most = MAX_MESSAGES
        self._clock = clock
        self._template = template
        for with_tools in (False, True):  # which takes longer than a request may
            for engine in ("vllm", "sglang"):
                dialect_of(engine).takes_lists(template.source(with_tools))
        self._inline_system: dict[bool, bool] = {}

    def whole(self, body: Mapping[str, Any], dialect: ChatDialect) -> Prompt | None:
        """The prompt of a chat; None if it takes too long or must not be rendered here. Raises `PromptError`,
        `TemplateError`."""
        return self._timed(prompt_of_chat, body, dialect)

    def beginning(self, body: Mapping[str, Any], dialect: ChatDialect) -> Prompt | None:
        """The prompt as far as the text of the last message that is given. None and raises as `whole`."""
        return self._timed(beginning_of_chat, body, dialect)

    def takes_lists(self, body: Mapping[str, Any], dialect: ChatDialect) -> bool:
        """Whether the template of this request takes the parts of a message as a list."""
        return dialect.takes_lists(self._template.source(dialect.tools(body) is not None))

    def inline_system(self, *, must_show: bool) -> bool:
        """Whether the template takes a system message in the midst of a chat; `must_show`: and prints it."""
        known = self._inline_system.get(must_show)
        if known is None:
            known = self._inline_system[must_show] = self._try_inline_system(must_show)
        return known

    def _try_inline_system(self, must_show: bool) -> bool:
        try:
            return takes_inline_system(self._template, must_show=must_show)
        except NeedsWorkerError:
            return False

    def _timed(self, render: Callable[..., Prompt], body: Mapping[str, Any], dialect: ChatDialect) -> Prompt | None:
        began = self._clock()
        count = len(body["messages"])
        try:
            prompt = render(body, self._template, dialect)
        except NeedsWorkerError:
            if count > _MIN_MESSAGES:
                self.most = max(_MIN_MESSAGES, min(self.most, count) // 4)
            return None
        if 2 * count > self.most and self._clock() - began < _SMALL_PART * RENDER_SECONDS:
            self.most = min(MAX_MESSAGES, self.most * 3 // 2)
        return prompt
