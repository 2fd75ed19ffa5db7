"""The keyer of a model's tokenizer and chat template.

Chats are rendered in the event loop, where no request may wait for long.

A template may take time that grows with the square of the messages (one that looks ahead for the results of each tool
call does). So a rendering has 3 ms of CPU time. One that takes longer is given up, and the chat's beginning is rendered
instead, a quarter of its messages. The number that fits is remembered for the next chats that begin alike, and grows
again while they take a small part of their time: slow chats of one client do not limit another's. The key of a
beginning is the beginning of the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from treeline_wire.apis.conversion import takes_inline_system
from treeline_wire.chat import ChatTemplate, NeedsWorkerError, TemplateError
from treeline_wire.dialects import ChatDialect, dialect_of
from treeline_wire.keys import PrefixKeys
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt, beginning_of_chat, prompt_of_chat
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.index.items import Items
from treeline_epp.keyers.base import Owner, Shares, TokenLengths
from treeline_epp.keyers.learnt_chats import LearntTemplate
from treeline_epp.keyers.made_apart import proven_keys

MAX_MESSAGES: Final = 256
"""Most messages that a template gets; each costs time."""
RENDER_SECONDS: Final = 0.003
_MIN_MESSAGES: Final = 16
"""This many are always tried: if they take too long, their number is not the reason."""
_SMALL_PART: Final = 0.4
"""Part of its time that a rendering may use for its bound to grow: 1.5 times the messages take at most 2.25 times as
long, if time grows with their square."""
_REMEMBERED: Final = 1024
"""Most chats with a bound below `MAX_MESSAGES` that are remembered, of all clients."""


class Bounds:
    """The number of messages that fit, by chat; a chat that continues another has the same bound. A chat is identified
    by its client and the texts of its first two messages, the system's and the first question.
    """

    def __init__(self) -> None:
        self._most: Shares[int, int] = Shares(_REMEMBERED)

    def of(self, messages: Sequence[Any], client: Owner = None) -> int:
        """Return the messages that a rendering of this chat takes. O(characters of the first two)."""
        own = self._most.of(client)
        return own.get(_beginning(messages), MAX_MESSAGES) if own else MAX_MESSAGES

    def keep(self, messages: Sequence[Any], most: int, client: Owner = None) -> None:
        """Set this chat's bound, at most `MAX_MESSAGES`."""
        chat = _beginning(messages)
        if most < MAX_MESSAGES:
            self._most.put(client, chat, most)
        else:
            self._most.drop(client, chat)


def _beginning(messages: Sequence[Any]) -> int:
    return hash(tuple(_text(message) for message in messages[:2]))


def _text(message: Any) -> str | None:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return next((text for text in parts if isinstance(text, str)), None)
    return content if isinstance(content, str) else None


class BoundedRenderer:
    """Renders the chats of one template. `clock` is CPU time, in seconds."""

    def __init__(self, template: ChatTemplate, clock: Callable[[], float] = time.thread_time) -> None:
        self.bounds = Bounds()
        self._clock = clock
        self._template = template
        for with_tools in (False, True):  # takes longer than a request may
            for engine in ("vllm", "sglang"):
                dialect_of(engine).takes_lists(template.source(with_tools))
        self._inline_system: dict[bool, bool] = {}

    @property
    def joined(self) -> int:
        """The number of chats that were joined instead of rendered, ever."""
        return self._template.joined if isinstance(self._template, LearntTemplate) else 0

    @property
    def differed(self) -> bool:
        """Whether joining and rendering were found to differ, and so all chats are rendered."""
        return isinstance(self._template, LearntTemplate) and self._template.differed

    def most(self, messages: Sequence[Any], client: Owner = None) -> int:
        """Return how many messages of this chat a rendering takes."""
        return self.bounds.of(messages, client)

    def whole(self, body: Mapping[str, Any], dialect: ChatDialect, client: Owner = None) -> Prompt | None:
        """Return the prompt of a chat; None if it takes too long or must not be rendered here. Raises `PromptError`,
        `TemplateError`.
        """
        return self._timed(prompt_of_chat, body, dialect, client)

    def beginning(self, body: Mapping[str, Any], dialect: ChatDialect, client: Owner = None) -> Prompt | None:
        """Return the prompt up to the text of the last given message. None and errors as in `whole`."""
        return self._timed(beginning_of_chat, body, dialect, client)

    def takes_lists(self, body: Mapping[str, Any], dialect: ChatDialect) -> bool:
        """Return whether the template of this request takes the parts of a message as a list."""
        return dialect.takes_lists(self._template.source(dialect.tools(body) is not None))

    def shows(self, kind: str) -> bool:
        """Return whether the model reads items of this kind."""
        return kind in self._template.placeholders

    def inline_system(self, *, must_show: bool) -> bool:
        """Return whether the template takes a system message in the middle of a chat; `must_show`: and prints it."""
        known = self._inline_system.get(must_show)
        if known is None:
            known = self._inline_system[must_show] = self._try_inline_system(must_show)
        return known

    def _try_inline_system(self, must_show: bool) -> bool:
        try:
            return takes_inline_system(self._template, must_show=must_show)
        except NeedsWorkerError:
            return False

    def _timed(
        self, render: Callable[..., Prompt], body: Mapping[str, Any], dialect: ChatDialect, client: Owner
    ) -> Prompt | None:
        messages = body["messages"]
        count, most = len(messages), self.bounds.of(messages, client)
        if isinstance(self._template, LearntTemplate):
            self._template.client = client
        may_grow = most < min(MAX_MESSAGES, 2 * count)
        began = self._clock() if may_grow else 0.0  # reading the CPU time is a system call
        try:
            prompt = render(body, self._template, dialect)
        except NeedsWorkerError:
            if count > _MIN_MESSAGES:
                self.bounds.keep(messages, max(_MIN_MESSAGES, min(most, count) // 4), client)
            return None
        if may_grow and self._clock() - began < _SMALL_PART * RENDER_SECONDS:
            self.bounds.keep(messages, most * 3 // 2, client)
        return prompt


class PromptKeyer(TokenLengths):
    """Turns requests into prefix keys for one tokenizer and its chat template.

    `keys` is `None` if the tokenizer loses text (`problem` says how): requests are then routed by history. `renderer`
    is `None` then, or without a chat template; `media` are the items of a model that takes images. Making a keyer
    blocks: for seconds, if the tokenizer is large.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        super().__init__()
        self.fingerprint = bundle.fingerprint
        self.problem: str | None = None
        self.keys: PrefixKeys | None = None
        self.media: Items | None = None
        self.renderer: BoundedRenderer | None = None
        try:
            self.keys = proven_keys(bundle.tokenizer_json)
        except ValueError as error:
            self.problem = f"no prefix keys for tokenizer {bundle.fingerprint}: {error}"
            return
        if bundle.media is not None:
            self.media = Items(self.keys, bundle.media)
        long_run("é")  # makes its tables now, so that no request waits for them
        try:
            template = LearntTemplate.from_bundle(bundle, inline_seconds=RENDER_SECONDS)
        except TemplateError as error:
            self.problem = f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: {error}"
            return
        if template is None:
            return
        if template.not_inline is not None:
            self.problem = (
                f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: its chat template is not a "
                f"plain one ({template.not_inline}), and is not rendered here"
            )
        self.renderer = BoundedRenderer(template)

    def key(self, prompt: Prompt) -> bytes | None:
        """Return the key of a prompt; `None` without keys."""
        return None if self.keys is None else self.keys.prompt_key_of(prompt)
