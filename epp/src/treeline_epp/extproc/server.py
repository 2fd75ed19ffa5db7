"""The ext_proc service: what a call of `Process` does with each message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError

from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.flow.ticket import Ticket
from treeline_epp.metrics import Sample
from treeline_epp.requests.router import Routed, Router

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_OVERHEAD_BYTES = 4 * 1024 * 1024
"""Room in a message beyond the body: headers, metadata, and bodies a little over the limit, which get a proper 413."""


class BadMessage(ValueError):
    """What the proxy sent is no `ProcessingRequest`."""


class ProcessCall:
    """One call: a session, counted while it is open. Close it in a `finally`: Envoy ends a call by half-closing it, by
    a reset, or by dying."""

    def __init__(self, router: Router, limits: SessionLimits, metadata: Mapping[str, str]) -> None:
        self._metrics = router.metrics
        self._session = ExtProcSession(router, limits, metadata)
        self._metrics.streams.inc()

    @property
    def ended(self) -> bool:
        """There is nothing more to say, and nothing to wait for."""
        return self._session.ended

    @property
    def lingers(self) -> bool:
        """There is nothing more to say, but it stays open until the proxy closes it."""
        return self._session.lingers

    def answers(self, data: bytes | None) -> Iterator[bytes | Ticket[Routed] | None]:
        """To one message, as `ExtProcSession.steps`. Raises BadMessage."""
        try:
            yield from self._session.steps(data)
        except DecodeError as error:
            self._metrics.protocol_errors.inc()
            raise BadMessage(f"not a ProcessingRequest: {error}") from None

    def close(self, *, lost: bool = False) -> None:
        """The call is over, in whatever way; `lost`: with its connection."""
        self._metrics.streams.dec()
        self._session.close(lost=lost)


class ExtProcService:
    """The `ExternalProcessor` service."""

    def __init__(self, router: Router, limits: SessionLimits) -> None:
        self._router = router
        self._limits = limits
        router.metrics.observe(self._samples)

    def open(self, metadata: Mapping[str, str]) -> ProcessCall:
        """A call begins, which came with this metadata."""
        return ProcessCall(self._router, self._limits, metadata)

    def _samples(self) -> Iterator[Sample]:
        text = "Bytes of request bodies that wait for their decision, beyond the first 64 KiB of each."
        yield "gauge", "waiting_body_bytes", text, {}, self._limits.waiting.bytes


def most_message_bytes(body_limit: int) -> int:
    """Of one message of a proxy whose bodies have at most `body_limit` bytes."""
    return body_limit + _OVERHEAD_BYTES
