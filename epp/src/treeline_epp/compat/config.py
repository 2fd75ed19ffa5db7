"""`EndpointPickerConfig` as GIE 1.5 and llm-d's router read it: decoded strictly, and checked as far as its form goes.

`inference.networking.x-k8s.io/v1alpha1` is GIE's, `llm-d.ai/v1alpha1` llm-d's, which has some members more. One that
a version does not know, or that occurs twice, is refused with its path. What the plugins come to is said elsewhere
(`plugins`, `plan`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from treeline_epp.yaml_text import decode_yaml

GIE, LLMD = "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1"
_KIND = "EndpointPickerConfig"
_MOST_BYTES = 1024 * 1024
_MOST_NODES = 20_000
"""Of the document with its aliases written out."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Quantity = str | int


class ConfigError(ValueError):
    """The configuration cannot be used. `path` says which member, the message why and what to use instead."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(f"{path}: {message}" if path else message)


class _Member(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """Part of the document."""


class PluginSpec(_Member):
    """A plugin; without a name it is called by its type."""

    type: Name
    name: str = ""
    parameters: Mapping[str, Any] | None = None


class Reference(_Member):
    """To a plugin, by name."""

    plugin_ref: Name


class WeightedReference(_Member):
    """A plugin in a profile; the weight counts for scorers."""

    plugin_ref: Name
    weight: float | None = None


class Profile(_Member):
    """What chooses an endpoint."""

    name: Name
    plugins: tuple[WeightedReference, ...] = ()


class Source(_Member):
    """Where an endpoint's attributes come from."""

    plugin_ref: Name
    extractors: tuple[Reference, ...] = ()


class DataLayer(_Member):
    """Sources of attributes."""

    sources: tuple[Source, ...] = ()


class LlmdDataLayer(DataLayer):
    """With llm-d's members."""

    inject_defaults: bool | None = None
    discovery: Reference | None = None
    peer_discovery: Reference | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: str | None = None


class PriorityBand(_Member):
    """A queue's bounds."""

    priority: int = 0
    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class FlowControl(_Member):
    """Queues before the choice."""

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: str | None = msgspec.field(default=None, name="defaultRequestTTL")
    default_priority_band: PriorityBand | None = None
    priority_bands: tuple[PriorityBand, ...] = ()
    usage_limit_policy_plugin_ref: str = ""


class Detector(_Member):
    """What says that a pool is saturated."""

    plugin_ref: str = ""


class LlmdFlowControl(FlowControl):
    """With llm-d's members."""

    no_endpoint_request_ttl: str | None = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_negative_priority_band: PriorityBand | None = None
    saturation_detector: Detector | None = None
    enable_eviction: bool = False


class RequestHandler(_Member):
    """What reads requests."""

    parsers: tuple[Reference, ...] = ()


class EndpointPickerConfig(_Member):
    """The document."""

    api_version: str
    kind: str
    feature_gates: tuple[str, ...] | None = None
    plugins: tuple[PluginSpec, ...] | None = None
    scheduling_profiles: tuple[Profile, ...] | None = None
    saturation_detector: Detector | None = None
    data_layer: DataLayer | None = None
    flow_control: FlowControl | None = None
    parser: Reference | None = None


class LlmdEndpointPickerConfig(EndpointPickerConfig):
    """With llm-d's members."""

    data_layer: LlmdDataLayer | None = None
    flow_control: LlmdFlowControl | None = None
    request_handler: RequestHandler | None = None


class _Head(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str


_TYPES: dict[str, type[EndpointPickerConfig]] = {GIE: EndpointPickerConfig, LLMD: LlmdEndpointPickerConfig}


def decode(text: str) -> EndpointPickerConfig:
    """The document in YAML or JSON. Raises ConfigError."""
    if len(text) > _MOST_BYTES:
        raise ConfigError("", f"the configuration has more than {_MOST_BYTES} characters")
    head = _decoded(text, _Head)
    if head.kind != _KIND:
        raise ConfigError("kind", f"must be {_KIND}, got {head.kind!r}")
    if head.api_version not in _TYPES:
        raise ConfigError("apiVersion", f"must be {GIE} or {LLMD}, got {head.api_version!r}")
    return _decoded(text, _TYPES[head.api_version])


_AT = re.compile(r"(?s)(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?")


T = TypeVar("T")


def _decoded(text: str, kind: type[T]) -> T:
    try:
        return decode_yaml(text, kind, _MOST_NODES)
    except msgspec.MsgspecError as error:
        found = _AT.fullmatch(str(error))
        assert found is not None
        raise ConfigError(found[2] or "", found[1].replace("Object ", "", 1)) from None
