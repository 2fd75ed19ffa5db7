"""Orders to a load process and its reports: msgspec structs in files and JSON lines."""

from __future__ import annotations

from typing import Any

import msgspec

Piece = str | list[int]
"""Part of a prompt: text or token ids."""


class Turn(msgspec.Struct, frozen=True):
    """A user's addition to a conversation, and the answer's length."""

    piece: Piece
    piece_tokens: int
    """Tokens of `piece`."""
    output_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """Turns in order; each request has all turns before it."""

    turns: list[Turn]


class Call(msgspec.Struct, frozen=True):
    """A POST; any whole answer with status 200 counts."""

    path: str
    body: bytes
    headers: dict[str, str] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a load for one process.

    `conversations` start in this order: at their moments of `arrivals`, in seconds after the start (open loop), or
    `concurrency` at a time (closed loop). After `seconds` no conversation or turn starts. `calls`, if given instead,
    are repeated `count` times or for `seconds`.
    """

    host: str
    port: int
    tls: bool = False
    path: str = ""
    headers: dict[str, str] = {}
    chat: bool = False
    fields: dict[str, Any] = {}
    """Further members of every body."""
    conversations: list[Conversation] = []
    calls: list[Call] = []
    count: int | None = None
    keep_header: str = ""
    """A response header to record."""
    arrivals: list[float] | None = None
    concurrency: int = 1
    seconds: float | None = None
    timeout_s: float = 300.0


class Record(msgspec.Struct):
    """The result of a request. Times are monotonic ns, shared by the machine's processes.

    `due_ns`: when it should have been sent; latencies count from there, so a late client makes them longer. `begun_ns`:
    when we started it; `sent_ns`: when it was written, perhaps after waiting for a connection. `tokens_ns`: when each
    chunk with output arrived. Token counts are the server's; `cached_tokens` is -1 if not reported. `error`: its kind,
    empty for a whole answer. `conversation`: the number of a call, if there are calls.
    """

    conversation: int
    turn: int
    asked_prompt_tokens: int
    asked_output_tokens: int
    due_ns: int
    begun_ns: int = 0
    sent_ns: int = 0
    done_ns: int = 0
    tokens_ns: list[int] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = -1
    error: str = ""
    detail: str = ""
    header: str = ""

    @property
    def latency_ms(self) -> float:
        """From sending to the whole answer."""
        return (self.done_ns - self.sent_ns) / 1e6


class LoadReport(msgspec.Struct):
    """A load process's report. `lag_ns`: how late its timers were, and so how late it saw arrivals."""

    records: list[Record]
    begin_ns: int
    lag_ns: list[int]
    busy_share: float
    """CPU time ÷ time while requests ran."""
    gone: str = ""
    """Why it gave up, if the server seems gone."""


class Progress(msgspec.Struct):
    """A progress line."""

    running: int
    ended: int
    failed: int
    tokens: int
    """Chunks of output so far."""


UNFINISHED = "unfinished"
"""The error kind of a request that we ended."""
