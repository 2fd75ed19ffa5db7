"""gpt-oss' harmony format: a series of messages, each in a channel.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

Analysis is reasoning; text without a recipient in other channels is the answer. A recipient may also precede the
channel. Format: OpenAI's "harmony response format".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from treeline_runtime.parsers.source import BrokenError, Source, Steps, markers
from treeline_runtime.parsers.tools import Functions, attempt, call

_START: Final = "<|start|>"
_TO: Final = " to="
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_CONSTRAIN: Final = "<|constrain|>"
_BEGINNINGS: Final = (_START, _CHANNEL)
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_BETWEEN: Final = markers(*_BEGINNINGS)
_WITHIN: Final = markers(*_BEGINNINGS, *_ENDS)

_WORDS: Final = re.compile(r"[^<]*")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w*)")


@dataclass(frozen=True)
class Harmony:
    """Reasoning, answer and calls in one."""

    special: bool = True

    def steps(self, source: Source, functions: Functions, prompt: str = "") -> Steps[None]:
        """Parses an output after `prompt`, which may have begun a message."""
        header, begun, content = prompt.rpartition(_START)[2].partition(_MESSAGE)
        if begun and not any(end in content for end in _ENDS):
            marker = yield from self._content(source, header)
        else:
            marker = yield from self._recipient(source)
        while True:
            if marker in ("", *_ENDS):
                marker = yield from self._between(source)
                if not marker:
                    return
            marker = yield from self._message(source, functions, marker)

    def _recipient(self, source: Source) -> Steps[str]:
        """The start of a message after the prompt's `<|start|>assistant`, if its recipient comes first."""
        try:
            yield from source.expect(_TO)
        except BrokenError:
            return ""
        return _TO

    def _between(self, source: Source) -> Steps[str]:
        source.say(source.release())
        return (yield from source.until(_BETWEEN, source.say))

    def _message(self, source: Source, functions: Functions, marker: str) -> Steps[str]:
        """Parses a message after its start; returns what ended it, perhaps the next one's start."""
        header = yield from self._header(source, marker)
        if not header:
            return ""
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            source.settle()
            return (yield from self._content(source, header))
        if not (yield from attempt(source, self._call(source, functions, recipient[1]))):
            return ""
        marker = yield from source.until(_WITHIN, source.say)
        source.settle()
        return marker

    def _header(self, source: Source, marker: str) -> Steps[str]:
        """Reads and holds a header up to the content; "" if the text is not a header. An incomplete one that began with
        a marker is not part of the answer."""
        header = [marker]
        try:
            while header[-1] != _MESSAGE:
                header.append((yield from source.take(_WORDS)))
                header.append((yield from source.one_of((_MESSAGE, _CHANNEL, _CONSTRAIN))))
                if not header[-1]:
                    raise BrokenError
        except BrokenError:
            if marker != _TO and not (yield from source.ahead()):
                source.settle()
            source.say(source.release())
            return ""
        return "".join(header)

    def _call(self, source: Source, functions: Functions, name: str) -> Steps[None]:
        if name not in functions:
            raise BrokenError
        yield from call(source, name)

    def _content(self, source: Source, header: str) -> Steps[str]:
        """Emits a message's content; returns what ended it."""
        channel = _CHANNEL_NAME.search(header)
        thought = channel is not None and channel[1] == "analysis"
        return (yield from source.exactly_until(_WITHIN, source.think if thought else source.say))


HARMONY: Final = Harmony()
ANSWER: Final = "<|channel|>final<|message|>"
"""The text before the answer."""
