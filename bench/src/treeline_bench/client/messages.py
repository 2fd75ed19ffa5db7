"""What the load client is told and what it tells: msgspec structs in files, msgpack."""

from __future__ import annotations

import msgspec


class Call(msgspec.Struct, frozen=True):
    """One POST."""

    path: str
    body: bytes
    headers: dict[str, str] = {}

    def request(self, host: str) -> bytes:
        """The bytes that go on the wire."""
        lines = [f"POST {self.path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"content-length: {len(self.body)}", "", ""]
        return "\r\n".join(lines).encode() + self.body


class ClosedLoop(msgspec.Struct, frozen=True, tag=True):
    """`concurrency` clients, each sending its next request when its last was answered: finds what a server can do."""

    concurrency: int


class Paced(msgspec.Struct, frozen=True, tag=True):
    """A request every 1/`rate_per_s`, whatever became of the others (open loop): shows what a user would see.

    `connections` are opened beforehand; more are opened when all are busy.
    """

    rate_per_s: float
    connections: int = 16


class Plan(msgspec.Struct, frozen=True):
    """`calls` are sent in order and over again, until `count` were sent or `seconds` have passed."""

    host: str
    port: int
    calls: list[Call]
    arrivals: ClosedLoop | Paced
    count: int | None = None
    seconds: float | None = None
    timeout_s: float = 30.0
    keep_header: str = ""
    """The response header whose value goes into the outcome."""


class Outcome(msgspec.Struct, array_like=True):
    """What became of one request. Times are of one monotonic clock, in ns.

    `status` 0 means that no complete answer came; `error` then says why. `late_ns` is how much later than planned the
    request was sent (paced only).
    """

    call: int
    status: int = 0
    sent_ns: int = 0
    done_ns: int = 0
    late_ns: int = 0
    error: str = ""
    header: str = ""

    @property
    def latency_ms(self) -> float:
        """Sent to answered whole."""
        return (self.done_ns - self.sent_ns) / 1e6


class Report(msgspec.Struct, frozen=True):
    """All outcomes, in the order in which they ended."""

    outcomes: list[Outcome]

    def answered(self) -> list[Outcome]:
        """Those with a 200."""
        return [outcome for outcome in self.outcomes if outcome.status == 200]

    def errors(self) -> int:
        return len(self.outcomes) - len(self.answered())

    def wall_s(self) -> float:
        """From the first request sent to the last answered; 0 when there was none."""
        if not self.outcomes:
            return 0.0
        first = min(outcome.sent_ns for outcome in self.outcomes)
        return (max(outcome.done_ns for outcome in self.outcomes) - first) / 1e9
