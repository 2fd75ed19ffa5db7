"""What flow control tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treeline_epp.flow.control import OUTCOMES, FlowControl
from treeline_epp.flow.quota_file import QuotaFile
from treeline_epp.metrics import Sample


def samples(control: FlowControl[Any]) -> Iterator[Sample]:
    """Gauges and counters for the metrics page."""
    for pool, held in control.held().items():
        labels = {"pool": pool}
        yield "gauge", "flow_held_requests", "Requests that wait in the picker, by pool.", labels, held.requests
        yield "gauge", "flow_held_bytes", "Bytes of their bodies.", labels, held.bytes
        text = "Tokens of their prompts that the endpoint which holds most of each would compute."
        yield "gauge", "flow_held_uncached_tokens", text, labels, held.uncached_tokens
        yield "gauge", "flow_oldest_seconds", "How long the first of them has waited.", labels, held.oldest_s
    for pool, priority, requests, flows in control.bands():
        labels = {"pool": pool, "priority": str(priority)}
        yield "gauge", "flow_band_requests", "Requests that wait, by pool and priority.", labels, requests
        yield "gauge", "flow_band_flows", "Flows (API keys, fairness ids) that have one there.", labels, flows
    text = "Requests that had to wait, or would have had to, by how that ended."
    for outcome in OUTCOMES:
        yield "counter", "flow_outcomes", text, {"outcome": outcome}, control.outcomes[outcome]


def quota_samples(file: QuotaFile) -> Iterator[Sample]:
    """The same of quotas."""
    text = "Requests that were refused since their client had what it may have."
    yield "counter", "flow_quota_exceeded", text, {}, file.quotas.exceeded
    yield "gauge", "flow_quota_clients", "Clients whose quota is counted.", {}, len(file.quotas)
    text = "1 while the quotas that hold are those of the file; 0 while it cannot be used, and those before hold."
    yield "gauge", "flow_quota_file_usable", text, {}, int(not file.error)
