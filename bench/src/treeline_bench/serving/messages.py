"""Orders to a load process and its reports: msgspec structs, in files and in lines of JSON."""

from __future__ import annotations

from typing import Any

import msgspec

Piece = str | list[int]
"""A part of a prompt: text, or token ids."""


class Turn(msgspec.Struct, frozen=True):
    """What a user adds to a conversation, and how long the answer is to be."""

    piece: Piece
    piece_tokens: int
    """How many tokens `piece` is."""
    output_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """Turns that are sent one after the other, each with all that was said before it."""

    turns: list[Turn]


class Call(msgspec.Struct, frozen=True):
    """A POST whose answer is any that is whole with a status of 200."""

    path: str
    body: bytes
    headers: dict[str, str] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a load that one process carries out.

    `conversations` begin in this order: each at its moment of `arrivals`, seconds after the start (open loop), or with
    `concurrency` of them going on at once (closed loop). With `seconds`, none begins and no turn is sent after that.
    `calls` in their place are sent over and over, `count` of them or until `seconds` are over.
    """

    host: str
    port: int
    tls: bool = False
    path: str = ""
    headers: dict[str, str] = {}
    chat: bool = False
    fields: dict[str, Any] = {}
    """What every body has beside prompt and length."""
    conversations: list[Conversation] = []
    calls: list[Call] = []
    count: int | None = None
    keep_header: str = ""
    """A header of answers whose value goes into the record."""
    arrivals: list[float] | None = None
    concurrency: int = 1
    seconds: float | None = None
    timeout_s: float = 300.0


class Record(msgspec.Struct):
    """What became of one request. Times are of the monotonic clock, which all processes of a machine share, in ns.

    `due_ns`: when it should have been sent; everything its user waits for counts from there, so a client that is late
    makes latencies longer, not shorter. `begun_ns`: when we turned to it, `sent_ns` when it was written, which may have
    had to wait for a connection. `tokens_ns`: when each chunk that carried output came. Token counts are the server's;
    `cached_tokens` is -1 where it reported none. `error` is the kind, empty for a whole answer. `conversation` is the
    number of a call, where there are calls.
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
        """Sent to answered whole."""
        return (self.done_ns - self.sent_ns) / 1e6


class LoadReport(msgspec.Struct):
    """What a load process has done. `lag_ns`: how late its timers were, which is how late it saw what arrived."""

    records: list[Record]
    begin_ns: int
    lag_ns: list[int]
    busy_share: float
    """CPU time of the process ÷ time, while requests ran."""
    gone: str = ""
    """Why it gave up, where the server seems to be gone."""


class Progress(msgspec.Struct):
    """A line while it runs."""

    running: int
    ended: int
    failed: int
    tokens: int
    """Chunks of output so far."""


UNFINISHED = "unfinished"
"""The kind of error of a request that we ended ourselves."""
