"""Input of planner and status: immutable snapshots of the cluster, from the API server or from files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
import yaml
from treeline_kube.resources import Ref as Ref
from treeline_kube.yaml_depth import MOST_DEPTH, check_depth, is_too_deep
from treeline_wire.settings import port_setting, setting

from treeline_operator import names
from treeline_operator.rbac import RULES_GROUPS

if TYPE_CHECKING:
    from treeline_operator.api.model import InferenceModel
    from treeline_operator.api.pool import InferencePool


class Key(NamedTuple):
    """One unit of reconciliation, which never runs twice at once."""

    kind: Literal["pool", "gateway", "models"]
    namespace: str
    name: str = ""


class Observed(msgspec.Struct, frozen=True):
    """An object as the API server has it, without `managedFields`.

    The body stays encoded: thousands are in memory, few are read. `foreign` are the `spec` fields of a child that
    others own, each as `managedFields` spell its path.
    """

    ref: Ref
    uid: str
    resource_version: str
    body: bytes
    foreign: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, obj: dict[str, Any]) -> Observed:
        """From a decoded object."""
        meta = obj["metadata"]
        kept = {**obj, "metadata": {k: v for k, v in meta.items() if k != "managedFields"}}
        return cls(Ref.of(obj), meta["uid"], meta.get("resourceVersion", ""), msgspec.json.encode(kept), _foreign(obj))

    @property
    def object(self) -> dict[str, Any]:
        """The decoded object; a new one at each call."""
        decoded: dict[str, Any] = msgspec.json.decode(self.body)
        return decoded


def _foreign(obj: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    meta = obj["metadata"]
    if obj["kind"] == "Pod" or (meta.get("labels") or {}).get(names.MANAGED_BY) != names.MANAGER:
        return ()
    # The API server attributes a webhook's changes to our writes to us, so they stay.
    others = (entry for entry in meta.get("managedFields") or () if entry.get("manager") != names.FIELD_MANAGER)
    specs = ((entry.get("fieldsV1") or {}).get("f:spec") for entry in others if not entry.get("subresource"))
    return tuple(path for spec in specs if spec for path in _leaves(("f:spec",), spec))


def _leaves(path: tuple[str, ...], fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for step, inner in fields.items():
        if inner:
            yield from _leaves((*path, step), inner)
        elif step != ".":
            yield (*path, step)


@dataclass(frozen=True, slots=True)
class Images:
    """The images that are used where a pool names none."""

    runtime: str = setting(
        "treeline-runtime:cpu", flag="--image-runtime", metavar="IMAGE", help="on CPUs (%(default)s)"
    )
    runtime_cuda: str = setting(
        "treeline-runtime:cuda",
        flag="--image-runtime-cuda",
        metavar="IMAGE",
        help="on NVIDIA devices (%(default)s)",
    )
    epp: str = setting("treeline-epp:latest", flag="--image-epp", metavar="IMAGE", help="the picker (%(default)s)")
    edge: str = setting("treeline-edge:latest", flag="--image-edge", metavar="IMAGE", help="Envoy (%(default)s)")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = setting(
        "IfNotPresent", flag="--image-pull-policy", help="default: %(default)s"
    )
    pull_secrets: tuple[str, ...] = setting(
        (),
        flag="--image-pull-secret",
        metavar="NAME",
        repeated=True,
        help="Secret with a registry's credentials, in the namespace of each pool; may be repeated",
    )
    """A pool's template may name others."""


PROMETHEUS: tuple[dict[str, Any], ...] = (
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    },
)
"""Default readers of metrics, as peers of a NetworkPolicy. The namespace is named because a user who may start pods
anywhere could give one the label."""


_PEER_FIELDS: Final = frozenset({"namespaceSelector", "podSelector", "ipBlock"})


def _json(text: str) -> Any:
    """The value of a JSON text, or argparse's error."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if is_too_deep(found):
        raise argparse.ArgumentTypeError(f"nested more than {MOST_DEPTH} deep")
    return found


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    """Peers of a NetworkPolicy, or argparse's complaint."""
    found = _json(text)
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError("not a list of NetworkPolicy peers")
    for peer in found:
        no_peer = f"{json.dumps(peer)} is no NetworkPolicy peer"
        if not isinstance(peer, dict) or not peer or peer.keys() - _PEER_FIELDS:
            raise argparse.ArgumentTypeError(f"{no_peer}: it has {', '.join(sorted(_PEER_FIELDS))}")
        if not all(isinstance(value, dict) for value in peer.values()):
            raise argparse.ArgumentTypeError(f"{no_peer}: its fields are objects")
    return tuple(found)


def _fragment(text: str) -> dict[str, Any]:
    """A fragment of a PodTemplate, or argparse's complaint."""
    found = _json(text)
    if not isinstance(found, dict) or not found.keys() <= {"metadata", "spec"}:
        raise argparse.ArgumentTypeError("not a fragment of a PodTemplate, which has metadata and spec")
    return found


def _presets(text: str) -> dict[str, dict[str, Any]]:
    """Presets by name, from JSON or a file with values of the chart, or argparse's complaint."""
    literal = text.lstrip().startswith("{")
    try:
        content = text if literal else Path(text).read_text()
        check_depth(content)
        found = yaml.safe_load(content)
        found = found if literal else (found or {}).get("presets") or {}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as exc:
        raise argparse.ArgumentTypeError(f"neither JSON nor a file with values of the chart: {exc}") from None
    if not isinstance(found, dict) or not all(isinstance(preset, dict) for preset in found.values()):
        raise argparse.ArgumentTypeError("not an object of presets, each a part of an InferencePool's spec by its name")
    return found


def _label(text: str) -> tuple[str, str]:
    """KEY=VALUE, or argparse's complaint."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


@dataclass(frozen=True, slots=True)
class Platform:
    """The operator's settings, and what the cluster offers.

    `apis` are the optional kinds that exist and may be read, each `group/version/Kind` (see `controller/kinds.py`);
    `forbidden` are the existing ones that may not be read. `operator_namespace` and `operator_labels` let
    NetworkPolicies admit the operator to the picker's admin page.
    """

    images: Images = Images()
    apis: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    operator_namespace: str = setting(
        "treeline-system",
        flag="--lease-namespace",
        metavar="NS",
        env="POD_NAMESPACE",
        help="the operator's own namespace (default: $POD_NAMESPACE, else treeline-system)",
    )
    cluster_domain: str = setting(
        "cluster.local", metavar="DOMAIN", help="domain of the cluster's DNS (default: %(default)s)"
    )
    api_server_ports: tuple[int, ...] = port_setting(
        (443, 6443),
        least=1,
        flag="--api-server-port",
        metavar="P",
        repeated=True,
        help="port of the API server (its Service's and its own), for NetworkPolicies of pickers; may be repeated "
        "(default: 443 and 6443)",
    )
    metrics_from: tuple[dict[str, Any], ...] = setting(
        PROMETHEUS,
        metavar="JSON",
        parse=_peers,
        help="who may read metrics of pods, pickers and Envoys: a list of NetworkPolicy peers, [] for none (default: "
        f"{json.dumps(PROMETHEUS)})",
    )
    monitor_labels: tuple[tuple[str, str], ...] = setting(
        (),
        flag="--monitor-label",
        metavar="KEY=VALUE",
        parse=_label,
        repeated=True,
        help="label of PodMonitors, for Prometheus' selector; may be repeated",
    )
    monitor_interval: str = setting(
        "", metavar="DURATION", help="scrape interval, such as 30s (default: Prometheus' own)"
    )
    scrape_api_ports: bool = setting(
        False,
        either=True,
        help="admit them also to the API ports of vllm, sglang and custom engines, which serve metrics there "
        "(default: no)",
    )
    epp_template: dict[str, Any] | None = setting(
        None,
        metavar="JSON",
        parse=_fragment,
        help="PodTemplate fragment for all pickers; pools' own fragments win (default: none)",
    )
    edge_template: dict[str, Any] | None = setting(
        None, metavar="JSON", parse=_fragment, help="the same for all Envoys (default: none)"
    )
    presets: dict[str, dict[str, Any]] | None = setting(
        None,
        metavar="JSON|FILE",
        parse=_presets,
        help="named parts of an InferencePool's spec, or a file of chart values with `presets`; a pool's own fields "
        "win (default: none)",
    )
    rules_group: str = setting(
        RULES_GROUPS[0],
        metavar="GROUP",
        choices=("", *RULES_GROUPS),
        help="API group of InferenceObjectives and InferenceModelRewrites, optional in the cluster: "
        f"{' or '.join(RULES_GROUPS)}; '' for none (default: %(default)s)",
    )
    operator_labels: tuple[tuple[str, str], ...] = (("app.kubernetes.io/name", "treeline-operator"),)

    def lacking(self, api: str) -> str:
        """Why an optional kind cannot be used; empty if it can."""
        if api in self.apis:
            return ""
        absent = f"the cluster does not have {api}"
        return f"the operator may not list and watch {api}: check its role" if api in self.forbidden else absent


class PickerEndpoint(msgspec.Struct, frozen=True):
    """One endpoint as the picker lists it; `name` is the pod's name.

    `in_flight` are the requests that it has or is about to get, None if unknown. It is 0 only if all pickers of the
    gateway report 0, and agree on whether the pod drains. `cached_tokens` are the tokens in its cache.
    `cache_sources_off` are its caches that it does not use any more, since an audit found wrong pages there.
    """

    name: str
    address: str
    ready: bool = False
    draining: bool = False
    in_flight: int | None = None
    cached_tokens: int = 0
    cache_sources_off: tuple[str, ...] = ()


class Event(NamedTuple):
    """A Warning event: the reason, when it was last seen, and the name and uid of its object."""

    reason: str
    message: str
    at: str
    name: str
    uid: str

    @classmethod
    def of(cls, obj: dict[str, Any]) -> Event:
        """From a decoded Event of core/v1."""
        about, series = obj.get("involvedObject") or {}, obj.get("series") or {}
        times = (series.get("lastObservedTime"), *map(obj.get, ("lastTimestamp", "eventTime", "firstTimestamp")))
        at = next(filter(None, times), "")
        reason, message = obj.get("reason") or "", obj.get("message") or ""
        return cls(reason, message, at, about.get("name", ""), about.get("uid", ""))


class PoolRouting(NamedTuple):
    """A picker's routing of a pool: `way` is `events` if it knows the caches, else `history`. `reason` and `message`
    explain `history`; both may be empty."""

    way: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class PickerView:
    """A picker's report: pool name → its endpoints, its models, its way of routing.

    It was true at `at` on the operator's clock, or later.
    """

    synced: bool
    pools: dict[str, tuple[PickerEndpoint, ...]] = field(default_factory=dict)
    models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    at: datetime | None = None
    routing: dict[str, PoolRouting] = field(default_factory=dict)


class Scaled(NamedTuple):
    """One time that the operator set a pool's replicas."""

    at: datetime
    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """State of scaling a pool by its pickers. `owner` is another autoscaler, which then has priority. `heard`: its
    pickers report their demand. `last` is None until this process has set the replicas. `prompts` are the pods that
    should compute prompts, 0 without `prefill`."""

    heard: bool = False
    owner: str = ""
    last: Scaled | None = None
    prompts: int = 0


@dataclass(frozen=True, slots=True)
class GatewayWorld:
    """A gateway name of a namespace, all pools that share it (oldest first), and its existing objects. `children` carry
    the gateway's label and no pool's; `pods` are the picker's and Envoy's. `unreadable` are pools that name the gateway
    and do not fit our types (written under a newer CRD): they still hold it. `models` are the namespace's
    InferenceModels.
    """

    namespace: str
    name: str
    pools: tuple[InferencePool, ...]
    children: tuple[Observed, ...]
    pods: tuple[Observed, ...]
    platform: Platform
    now: datetime
    unreadable: tuple[Observed, ...] = ()
    models: tuple[InferenceModel, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolWorld:
    """A pool and everything that its plan and status depend on.

    `children` carry the pool's label, `pods` are its runtime pods. `gateway` is the shared gateway, as in its own plan.
    `picker` is None without a report of the picker; `picker_silent_since` is when it fell silent. `events`
    are Warning events of its pods and ReplicaSets. `parents` are its readable Gateways. `scaling` is None until the
    scaler has looked at it. `commits` maps the URIs of running downloads to commits.
    """

    pool: InferencePool
    children: tuple[Observed, ...]
    pods: tuple[Observed, ...]
    gateway: GatewayWorld
    picker: PickerView | None
    platform: Platform
    now: datetime
    events: tuple[Event, ...] = ()
    parents: tuple[Observed, ...] = ()
    picker_silent_since: datetime | None = None
    scaling: Scaling | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
