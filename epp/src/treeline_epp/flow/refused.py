"""Why a request that had to wait gets no endpoint."""

from __future__ import annotations

from treeline_epp.picking.decision import PickError


class FlowRefused(PickError):
    """It waited, or would have had to. `code` is that of the client's error; `retry_after_s` when to come back; `told`
    are response headers besides."""

    def __init__(
        self,
        message: str,
        status: int,
        reason: str,
        code: str,
        retry_after_s: float = 1.0,
        told: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.code = code
        self.retry_after_s = retry_after_s
        self.told = told


def queue_full(why: str, *, empty: bool) -> FlowRefused:
    """429: as many requests wait as may; 503 where they wait for a pool without an endpoint."""
    status, reason = (503, "rejected-no-endpoints") if empty else (429, "rejected-saturated")
    return FlowRefused(f"Too many requests: {why}.", status, reason, "queue_full")


def waited_too_long(waited_s: float, *, empty: bool) -> FlowRefused:
    """429: its time is over; 503 where there still is no endpoint."""
    why = "no endpoint of its pool was ready" if empty else "every endpoint had enough to do"
    message = f"The request waited {waited_s:.3g} s, and {why}."
    return FlowRefused(message, 503 if empty else 429, "rejected-ttl-expired", "waited_too_long")


def shutting_down() -> FlowRefused:
    """503: the picker stops. Another one may take the request."""
    message = "The endpoint picker that held the request is shutting down."
    return FlowRefused(message, 503, "rejected-shutting-down", "shutting_down")
