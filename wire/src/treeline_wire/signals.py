"""The demand for pools, streamed from pickers to the autoscaler.

`GET /signals` on a picker's admin port answers JSON lines, each a whole `Signals`: one at once, one after each change
(at most `MOST_PER_S` a second), and one every `HEARTBEAT_S`. A reader that gets nothing for `SILENT_S` has lost the
picker. All values are current or from a stated period, never totals, so a restarted picker is understood. Fields are
only added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

PATH: Final = "/signals"
CONTENT_TYPE: Final = "application/x-ndjson"
MOST_PER_S: Final = 4
HEARTBEAT_S: Final = 2.0
SILENT_S: Final = 6.0
RECENT_S: Final = 10.0
"""The length of "recently"."""
MOST_LINE_BYTES: Final = 4 << 20

MOST_COUNT: Final = 1 << 53
MOST_SECONDS: Final = 1e9

Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]


class Waiting(msgspec.Struct, frozen=True):
    """Requests without an endpoint yet, and their uncached prompt tokens."""

    requests: Count = 0
    tokens: Count = 0

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(self.requests + other.requests, self.tokens + other.tokens)


NOTHING_WAITS: Final = Waiting()


class Asked(msgspec.Struct, frozen=True):
    """The demand that only this picker knows, for a pool or one of its models.

    `held`: waiting here for an endpoint, counted per pool only. `missed`: arrived recently while none was ready, and
    were refused or sent to another pool. `picks`: got an endpoint recently; `ttft_p50_s` and `ttft_p90_s`: quantiles of
    their predicted time to first token, None without picks. `prompt_load`: how many endpoints the prompts that are
    better computed apart would keep busy, an average that fades over a minute, per pool only.
    """

    held: Waiting = NOTHING_WAITS
    missed: Waiting = NOTHING_WAITS
    picks: Count = 0
    ttft_p50_s: Seconds | None = None
    ttft_p90_s: Seconds | None = None
    prompt_load: Seconds = 0.0


class PoolSignals(msgspec.Struct, frozen=True):
    """The demand for a pool, as one picker sees it.

    `asked`: for all its models; `models`: for each model asked for recently. The rest concerns endpoints that
    answer and do not drain, and all pickers see the same: `ready`: may be picked; `in_flight_requests`: running there
    or on the way; `queued_tokens`: prompt tokens waiting there; `in_flight_tokens`: of requests without a first token,
    from this picker and those it hears; `silent`: ready endpoints that report no load, so the counts may be too low.
    """

    asked: Asked = Asked()
    models: dict[str, Asked] = {}
    ready: Count = 0
    queued_tokens: Count = 0
    in_flight_requests: Count = 0
    in_flight_tokens: Count = 0
    silent: Count = 0


class Signals(msgspec.Struct, frozen=True):
    """One picker's report. `synced`: it knows all pools, so a missing pool is not its own."""

    synced: bool = False
    pools: dict[str, PoolSignals] = {}


def encode(signals: Signals) -> bytes:
    """Encodes one line."""
    return msgspec.json.encode(signals) + b"\n"


def decode(line: bytes) -> Signals:
    """Decodes one line. Raises `msgspec.MsgspecError`, also for endless nesting and invalid UTF-8."""
    try:
        return _decode(line)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error


_decode = msgspec.json.Decoder(Signals).decode


def merged(told: Iterable[PoolSignals]) -> PoolSignals:
    """Combines several pickers' signals of a pool. Demand that only one knows adds up; of common facts, and of
    quantiles, the largest counts.
    """
    found = list(told)
    models = dict.fromkeys(name for one in found for name in one.models)
    return PoolSignals(
        _asked([one.asked for one in found]),
        {name: _asked([one.models[name] for one in found if name in one.models]) for name in models},
        ready=max((one.ready for one in found), default=0),
        queued_tokens=max((one.queued_tokens for one in found), default=0),
        in_flight_requests=max((one.in_flight_requests for one in found), default=0),
        in_flight_tokens=max((one.in_flight_tokens for one in found), default=0),
        silent=min((one.silent for one in found), default=0),  # one picker with its reports is enough
    )


def _asked(told: list[Asked]) -> Asked:
    return Asked(
        sum((one.held for one in told), NOTHING_WAITS),
        sum((one.missed for one in told), NOTHING_WAITS),
        sum(one.picks for one in told),
        max((one.ttft_p50_s for one in told if one.ttft_p50_s is not None), default=None),
        max((one.ttft_p90_s for one in told if one.ttft_p90_s is not None), default=None),
        math.fsum(one.prompt_load for one in told),
    )
