"""Reads a response's token counts from the kept parts of its body: the last bytes, and the first.

Every API reports them at its end: in a JSON object, or in one of the last events of a stream. Anthropic's streams
report the prompt's at their beginning. Read are `usage` (OpenAI's and Anthropic's members), also within `response` or
`message`, SGLang's `meta_info`, and Ollama's counts. Truncated, compressed or invalid values are unknown; nothing is
guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from treeline_epp.requests.body import Buffer

KEPT_OF_STREAM: Final = 16 * 1024
"""Least bytes of a stream's end that are kept. There may be thousands of streams."""
KEPT_OF_OBJECT: Final = 128 * 1024
"""Most bytes of an answer that is no stream; a larger one is not read."""
_FIRST_BYTES = 4096
_MOST_PIECES = 64
_LAST_EVENTS = 8
_MOST_TOKENS = 10**9
MOST_COUNTED: Final = 1 << 22
"""Most tokens of one request that count: more is the engine's mistake, for which no client should pay."""


class _Document(msgspec.Struct, gc=False):
    usage: Any = None
    meta_info: Any = None
    response: Any = None
    message: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None


_decode = msgspec.json.Decoder(_Document).decode


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The token counts of a response; None where it does not report one. `cached` are a part of `prompt`."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None

    def over(self, other: Usage) -> Usage:
        """Return these counts, completed by the other's."""
        return Usage(
            other.prompt if self.prompt is None else self.prompt,
            other.cached if self.cached is None else self.cached,
            other.output if self.output is None else self.output,
        )

    def counted(self) -> Usage:
        """Return these counts, each at most MOST_COUNTED."""
        return Usage(*(None if each is None else min(each, MOST_COUNTED) for each in msgspec.structs.astuple(self)))


NOTHING: Final = Usage()


def is_stream(headers: Mapping[str, str]) -> bool:
    """Return whether a response comes as its tokens are made: as events, or as Ollama's lines."""
    return headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))


class UsageReader:
    """Keeps the pieces of a response's body that may have its usage; `stream`: the body is a stream of events."""

    __slots__ = ("_first", "_kept", "_last", "bytes", "events", "stream")

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        self.bytes = 0
        self.events = 0
        """Number of a stream's events: each is about a token."""
        self._first = b""
        self._last: deque[bytes] = deque()
        self._kept = 0

    def feed(self, data: Buffer) -> None:
        """Take the next piece. O(bytes) at memory speed; among many small ones, one copies the kept bytes."""
        if not data:
            return
        if not self.bytes:
            self._first = bytes(data[:_FIRST_BYTES])
        self.bytes += len(data)
        if not self.stream and self.bytes > KEPT_OF_OBJECT:  # a part of an object cannot be read
            self._last.clear()
            self._kept = 0
            return
        most = KEPT_OF_STREAM if self.stream else KEPT_OF_OBJECT
        piece = bytes(data[-most:])
        if self.stream:
            self.events += piece.count(b"data:") + piece.count(b'"done":')
        kept = self._kept + len(piece)
        last = self._last
        last.append(piece)
        while kept - len(last[0]) >= most:
            kept -= len(last.popleft())
        if len(last) > _MOST_PIECES:  # small pieces: joined, they take no more memory than their bytes
            joined = b"".join(last)[-most:]
            last.clear()
            last.append(joined)
            kept = len(joined)
        self._kept = kept

    def told(self) -> Usage:
        """Return the usage in the body so far."""
        if not self._last:
            return NOTHING
        last = b"".join(self._last)
        return usage_of(self._first, last, stream=self.stream, whole=len(last) == self.bytes)

    def estimate(self) -> Usage:
        """Return the usage; if a stream does not report its output, its events count as tokens."""
        return self.told().over(Usage(output=self.events or None))


def usage_of(first: bytes, last: bytes, *, stream: bool, whole: bool) -> Usage:
    """Return the usage of a response that begins with `first` and ends with `last`; `whole`: `last` is all of it.
    `stream`: it is a stream of events. O(bytes). Never raises.
    """
    if not stream:
        return _within(_object(last)) if whole else NOTHING
    found = NOTHING
    lines = last.splitlines()
    if not whole and lines:
        del lines[0]  # its beginning may be missing
    for event in _events(reversed(lines)):
        found = found.over(_within(event))
        if None not in (found.prompt, found.output):
            return found
    for event in _events(iter(first.splitlines())):
        found = found.over(_within(event))
    return found


def _events(lines: Iterator[bytes]) -> Iterator[_Document]:
    """Yield the first few events that are objects."""
    count = 0
    for line in lines:
        if line.startswith((b"data:", b"{")) and not line.endswith(b"[DONE]"):
            yield _object(line.removeprefix(b"data:"))
            count += 1
            if count == _LAST_EVENTS:
                return


def _object(data: bytes) -> _Document:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Document()


def _within(document: _Document) -> Usage:
    if document.eval_count is not None:
        return Usage(_count(document.prompt_eval_count), None, _count(document.eval_count))
    for said in (document.usage, document.meta_info):
        if isinstance(said, dict):
            return _usage(said)
    for holder in (document.response, document.message):
        if isinstance(holder, dict) and isinstance(said := holder.get("usage"), dict):
            return _usage(said)
    return NOTHING


def _usage(said: dict[str, Any]) -> Usage:
    if "cache_read_input_tokens" in said or "cache_creation_input_tokens" in said:  # Anthropic counts them separately
        parts = [said.get("input_tokens"), said.get("cache_read_input_tokens"), said.get("cache_creation_input_tokens")]
        counts = [_count(part) or 0 for part in parts]
        prompt = None if _count(parts[0]) is None else sum(counts)
        return Usage(prompt, None if prompt is None else counts[1], _count(said.get("output_tokens")))
    return Usage(
        _first(said, "prompt_tokens", "input_tokens"),
        _cached(said),
        _first(said, "completion_tokens", "output_tokens"),
    )


def _cached(said: dict[str, Any]) -> int | None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if isinstance(details := said.get(name), dict):
            return _count(details.get("cached_tokens"))
    return _count(said.get("cached_tokens"))


def _first(said: dict[str, Any], *names: str) -> int | None:
    return next((count for name in names if (count := _count(said.get(name))) is not None), None)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
