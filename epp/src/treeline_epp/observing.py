"""The observers of requests that the flags ask for: other pickers' metrics, and traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from treeline_epp.compat.gie_metrics import GieMetrics
from treeline_epp.metrics import Metrics
from treeline_epp.options import GIE, OURS, Options
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.exchange import Observer, Observers

if TYPE_CHECKING:
    from treeline_epp.tracing import Tracing


class Observing:
    """All observers that the flags ask for; without any, a request costs nothing more. Use it as a context, on the
    event loop. Raises TracingError.
    """

    def __init__(self, options: Options, picker: Picker, metrics: Metrics) -> None:
        self._metrics, self._shows_ours = metrics, OURS in options.metrics_families
        namespace = options.pool_namespace if options.kubernetes else ""
        self._gie = GieMetrics(picker, namespace) if GIE in options.metrics_families else None
        self._tracing = _tracing() if options.tracing else None
        found: Sequence[Observer | None] = (self._gie, self._tracing)
        self.observers = Observers([observer for observer in found if observer is not None])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tracing is not None:
            await self._tracing.stop()

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that has gone for good."""
        self._metrics.forget(endpoint)
        if self._gie is not None:
            self._gie.forget(endpoint)

    def page(self) -> bytes:
        """Return the page that a scrape gets, with each family in turn."""
        ours = self._metrics.render() if self._shows_ours else b""
        return ours if self._gie is None else ours + self._gie.render()


def _tracing() -> Tracing | None:
    from treeline_wire import tracing as sdk

    from treeline_epp import tracing

    spans = sdk.exporter()
    return None if spans is None else tracing.Tracing(sdk.provider(spans, tracing.SERVICE))
