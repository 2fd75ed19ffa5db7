"""Parses a streamed answer (server-sent events) from bytes, without a socket.

Formats: OpenAI's `/v1/completions` and `/v1/chat/completions` with `stream_options.include_usage`, and what vLLM and
SGLang add (`reasoning_content`). Only measured members are decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

END = b"[DONE]"
MAX_EVENT_BYTES = 8 << 20


class NotEvents(ValueError):
    """The bytes are not a stream of chunks; the message quotes them."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's counts."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        """-1 if the server does not report it."""
        details = self.prompt_tokens_details
        return -1 if details is None or details.cached_tokens is None else details.cached_tokens


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | str | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Answer:
    """An answer, fed with its body's bytes.

    A chunk counts as output if it has text, or is an empty piece in the middle (a token without text yet); the initial
    role and a bare end do not.
    """

    def __init__(self, keep_text: bool) -> None:
        self.usage: Usage | None = None
        self.error = ""
        """The server's error in the middle of the stream."""
        self.finished = False
        """Whether it has ended well, with a finish_reason or [DONE]."""
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._rest = b""

    @property
    def text(self) -> str:
        """The text so far, if kept, without reasoning."""
        return "".join(self._texts)

    def feed(self, data: bytes) -> int:
        """Adds bytes; returns newly completed chunks with output. Raises NotEvents."""
        if b"\r" in data:
            data = data.replace(b"\r", b"")  # JSON contains no plain carriage return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise NotEvents(f"an event of more than {MAX_EVENT_BYTES >> 20} MB")
        return sum(self._take(event) for event in events)

    def _take(self, event: bytes) -> bool:
        if event.startswith(b"data:") and b"\n" not in event:
            data = event[5:].strip()
        else:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return False  # a comment, as servers send to keep a connection alive
            data = b"\n".join(lines)
        if data == END:
            self.finished = True
            return False
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise NotEvents(f"{error}: {data[:120]!r}") from None
        if chunk.error is not None:
            self.error = (chunk.error if isinstance(chunk.error, str) else chunk.error.message) or "an error"
        if chunk.usage is not None:
            self.usage = chunk.usage
        outputs = [self._output(choice) for choice in chunk.choices]
        return any(outputs)

    def _output(self, choice: _Choice) -> bool:
        delta = choice.delta
        text = (choice.text if delta is None else delta.content) or ""
        if self._keep_text and text:
            self._texts.append(text)
        if choice.finish_reason is not None:
            self.finished = True
        if text:
            return True
        if delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls):
            return True
        return choice.finish_reason is None and (delta is None or delta.role is None)
