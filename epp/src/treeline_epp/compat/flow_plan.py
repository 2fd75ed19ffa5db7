"""Flow control of another picker's configuration, as settings of ours (docs/flow-control.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from treeline_epp.compat.config import (
    ConfigError,
    EndpointPickerConfig,
    FlowControl,
    LlmdEndpointPickerConfig,
    LlmdFlowControl,
    PluginSpec,
    PriorityBand,
)
from treeline_epp.compat.values import quantity, seconds

FLOW_GATE = "flowControl"
_LONGEST_S = 3600.0
_LLMD_TTL_S = 60.0
"""How long llm-d's router has a request wait where its configuration does not say."""
_CONCURRENCY = "concurrency-detector"
DETECTORS = frozenset({_CONCURRENCY, "utilization-detector"})
"""They say what makes requests wait, where they do."""


@dataclasses.dataclass
class Plan:
    """`settings` by field of `Options`: what holds where no flag says otherwise. `told` are sentences for the log."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    told: list[str] = dataclasses.field(default_factory=list)


def flow_plan(made: Plan, config: EndpointPickerConfig, specs: Mapping[str, PluginSpec]) -> None:
    """What `flowControl` and its detector come to. Raises ConfigError."""
    flow = config.flow_control or FlowControl()
    _detector(made, config, flow, specs)
    _ttl(made, "flowControl.defaultRequestTTL", flow.default_request_ttl, "flow_ttl_seconds")
    _band(made, flow.default_priority_band)
    if isinstance(config, LlmdEndpointPickerConfig):  # its requests wait for a pool that is empty, too
        made.settings["hold_empty_pool_seconds"] = made.settings.get("flow_ttl_seconds", _LLMD_TTL_S)
    if flow.max_bytes is not None or flow.max_requests is not None:
        made.told.append("flowControl: --max-waiting-body-bytes alone bounds what waits at all priorities together")
    if flow.priority_bands:
        made.told.append("flowControl.priorityBands have no effect: all priorities have the bounds of the default")
    if isinstance(flow, LlmdFlowControl):
        _ttl(made, "flowControl.noEndpointRequestTTL", flow.no_endpoint_request_ttl, "hold_empty_pool_seconds")
        if flow.default_negative_priority_band is not None:
            told = "requests of negative priority do not wait, but are refused while there is no room"
            made.told.append(f"flowControl.defaultNegativePriorityBand has no effect: {told}")
        if flow.enable_eviction:
            made.told.append("flowControl.enableEviction has no effect: requests that run are not ended for others")


def references_of_flow(flow: FlowControl) -> Iterator[tuple[str, str]]:
    """`(path, name)` of the plugins that flow control refers to."""
    bands = [("defaultPriorityBand", flow.default_priority_band)]
    bands += [(f"priorityBands[{at}]", band) for at, band in enumerate(flow.priority_bands)]
    found = [("usageLimitPolicyPluginRef", flow.usage_limit_policy_plugin_ref)]
    if isinstance(flow, LlmdFlowControl):
        bands.append(("defaultNegativePriorityBand", flow.default_negative_priority_band))
        if flow.saturation_detector is not None:
            found.append(("saturationDetector.pluginRef", flow.saturation_detector.plugin_ref))
    for path, band in bands:
        if band is not None:
            found.append((f"{path}.fairnessPolicyRef", band.fairness_policy_ref))
            found.append((f"{path}.orderingPolicyRef", band.ordering_policy_ref))
    return ((f"flowControl.{path}", name) for path, name in found if name)


def _detector(made: Plan, config: EndpointPickerConfig, flow: FlowControl, specs: Mapping[str, PluginSpec]) -> None:
    """What makes requests wait: predicted waiting time, or a number of requests at each endpoint."""
    detectors = [config.saturation_detector, flow.saturation_detector if isinstance(flow, LlmdFlowControl) else None]
    name = next((one.plugin_ref for one in detectors if one is not None and one.plugin_ref), "")
    spec = specs.get(name)
    kind = name if spec is None else spec.type
    made.settings["flow_control"] = "requests" if kind == _CONCURRENCY else "wait"
    most = dict((spec.parameters if spec is not None else None) or {}).get("maxConcurrency")
    if kind != _CONCURRENCY or most is None:
        return
    if type(most) is not int or most < 1:
        raise ConfigError(f"maxConcurrency of {name}", f"must be a whole number of at least 1, got {most!r}")
    made.settings["flow_endpoint_requests"] = most


def _ttl(made: Plan, path: str, text: str | None, setting: str) -> None:
    if text is None:
        return
    try:
        value = seconds(text)
    except ValueError as error:
        raise ConfigError(path, str(error)) from None
    if not 0 < value <= _LONGEST_S:
        raise ConfigError(path, f"must be above 0 and at most {_LONGEST_S:g} s, got {text!r}")
    made.settings[setting] = value


def _band(made: Plan, band: PriorityBand | None) -> None:
    path = "flowControl.defaultPriorityBand"
    for member, value, setting in (
        (
            ("maxBytes", band.max_bytes, "flow_max_bytes"),
            ("maxRequests", band.max_requests, "flow_max_requests"),
        )
        if band is not None
        else ()
    ):
        if value is None:
            continue
        try:
            most = quantity(value)
        except ValueError as error:
            raise ConfigError(f"{path}.{member}", str(error)) from None
        if most < 1:
            raise ConfigError(f"{path}.{member}", "must be at least 1: without a bound nothing would ever be refused")
        made.settings[setting] = most
