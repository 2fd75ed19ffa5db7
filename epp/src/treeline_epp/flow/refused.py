"""Why a request that had to wait gets no endpoint."""

from __future__ import annotations

from treeline_epp.picking.decision import PickError


class FlowRefused(PickError):
    """It waited, or would have had to. `code` is that of the client's error; `retry_after_s` when to come back."""

    code = "saturated"
    retry_after_s = 1.0


class QueueFull(FlowRefused):
    """As many requests wait as may: 429, or 503 where they wait for a pool without an endpoint."""

    def __init__(self, message: str, *, empty: bool, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status, self.reason = (503, "rejected-no-endpoints") if empty else (429, "rejected-saturated")
        self.code = "queue_full"


class WaitedTooLong(FlowRefused):
    """Its time is over: 429, or 503 where there still is no endpoint."""

    reason = "rejected-ttl-expired"
    code = "waited_too_long"

    def __init__(self, waited_s: float, *, empty: bool) -> None:
        why = "no endpoint of its pool was ready" if empty else "every endpoint had enough to do"
        super().__init__(f"The request waited {waited_s:.3g} s, and {why}.")
        self.status = 503 if empty else 429


class ShuttingDown(FlowRefused):
    """The picker stops: 503. Another one may take the request."""

    status = 503
    reason = "rejected-shutting-down"
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The endpoint picker that held the request is shutting down.")


class NotAtOnce(FlowRefused):
    """412: it would have had to wait, and its client had rather hear so."""

    status = 412
    reason = "rejected-saturated"
    code = "not_available"

    def __init__(self) -> None:
        super().__init__("The request would have to wait, and says `Prefer: if-available`.")
