"""Flow control as a picker's process has it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Histogram

from treeline_epp.flow.control import FlowControl, Room
from treeline_epp.flow.pump import Pump
from treeline_epp.flow.quota_file import QuotaFile
from treeline_epp.flow.report import quota_samples, samples
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import R
from treeline_epp.metrics import Metrics

_WAIT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0)


def flow_control(
    settings: FlowSettings, room: Room, metrics: Metrics, clock: Callable[[], float], cost: Callable[[R], float]
) -> FlowControl[R] | None:
    """As the flags ask for it, pumped by the running loop; None where nothing may wait."""
    if not settings.may_hold:
        return None
    waited = Histogram(
        "treeline_epp_flow_wait_seconds",
        "Time that requests waited in the picker, of those whose turn came.",
        buckets=_WAIT_BUCKETS,
        registry=metrics.registry,
    )
    control = FlowControl(settings, room, clock, cost, waited.observe)
    Pump(control)
    metrics.observe(lambda: samples(control))
    return control


def quotas_of(settings: FlowSettings, metrics: Metrics) -> QuotaFile | None:
    """The settings' file, to be followed; None where there is none. Raises QuotaFileError."""
    if settings.quotas_file is None:
        return None
    file = QuotaFile(settings.quotas_file)
    metrics.observe(lambda: quota_samples(file))
    return file
