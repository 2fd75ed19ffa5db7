"""Owns what the pools of a gateway share: the picker, our own Envoy, the parents of Gateway API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StringConstraints, WithJsonSchema
from treeline_wire import tracing_env
from treeline_wire.headers import CREDENTIALS

from treeline_operator.api.engine import Image, Text
from treeline_operator.api.parts import (
    DNS_NAME_PATTERN,
    NO_QUALIFIED_NAME,
    PORT_PATTERN,
    QUALIFIED_NAME_PATTERN,
    SET,
    SHORT_NAME_PATTERN,
    DnsLabel,
    DnsName,
    NamedRef,
    Part,
    Port,
    Resources,
    template_rules,
    template_schema,
)
from treeline_operator.api.rules import Rule, forbidden
from treeline_operator.names import MAX_NAME

Policy = Literal[
    "treeline",
    "predicted_ttft",
    "cache_aware",
    "round_robin",
    "random",
    "power_of_two",
    "least_load",
    "prefix_hash",
    "consistent_hashing",
    "bucket",
    "lora_affinity",
]

PARAMETERS: Final[Mapping[str, tuple[Policy, ...]]] = {
    "cacheThreshold": ("cache_aware",),
    "balanceAbsThreshold": ("cache_aware", "bucket"),
    "balanceRelThreshold": ("cache_aware", "bucket"),
    "prefixTokenCount": ("prefix_hash",),
    "loadFactor": ("prefix_hash", "consistent_hashing"),
    "bucketAdjustIntervalSecs": ("bucket",),
    "loadS": ("lora_affinity",),
    "rememberS": ("lora_affinity",),
}
"""Parameter → the policies that have it; refused for others, as by the picker."""

HEEDING: Final = frozenset({"treeline", "predicted_ttft", "cache_aware", "lora_affinity"})
"""Policies that use cached prefixes. `prefix_hash` reads prompts, too, and needs no tokenizer."""

Number = Annotated[StrictFloat, Field(ge=0, le=1_000_000)]
Factor = Annotated[StrictFloat, Field(ge=1, le=1000)]


def parameter_rules() -> tuple[Rule, ...]:
    """A rule for each parameter: only with a policy that has it."""
    return tuple(_rule(name, policies) for name, policies in PARAMETERS.items())


def _rule(name: str, policies: tuple[Policy, ...]) -> Rule:
    return forbidden(
        f"!has(self.policyParameters) || !has(self.policyParameters.{name}) || self.policy in {list(policies)}",
        f"{name} is a parameter of {' and '.join(policies)}: remove it, or choose that policy",
        field=f".policyParameters.{name}",
    )


class PolicyParameters(Part):
    """Parameters of the policy; one that the policy does not have is refused. docs/routing.md has their meaning."""

    cache_threshold: Annotated[StrictFloat, Field(ge=0, le=1)] | None = None
    """cache_aware: share of a prompt that its pod must have cached; default 0.3."""
    balance_abs_threshold: Number | None = None
    """cache_aware (default 64 requests) and bucket (32 characters): smaller differences in load count as even."""
    balance_rel_threshold: Factor | None = None
    """cache_aware (default 1.5) and bucket (1.0001): smaller load ratios count as even."""
    prefix_token_count: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """prefix_hash: tokens of the prompt that are hashed; default 256."""
    load_factor: Factor | None = None
    """prefix_hash and consistent_hashing: largest load of a pod, in times of the average; default 1.25."""
    bucket_adjust_interval_secs: Annotated[StrictFloat, Field(gt=0, le=86400)] | None = None
    """bucket: interval of updating the length ranges; default 5."""
    load_s: Number | None = None
    """lora_affinity: seconds to load an adapter; default 1."""
    remember_s: Number | None = None
    """lora_affinity: seconds that a pod keeps an adapter after a request; default 60."""

    @property
    def given(self) -> dict[str, str]:
        """The parameters that are set, by the picker's names."""
        found = self.model_dump(exclude_none=True)
        return {name: f"{value:.12g}" if isinstance(value, float) else str(value) for name, value in found.items()}


Seconds = Annotated[StrictFloat, Field(gt=0, le=3600)]
"""At most the time for which our own Envoy lets a request wait."""
HeaderName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]


def _only_enabled(field: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || self.enabled",
        f"{field} needs flow control: set enabled, or remove {field}",
        field=f".{field}",
    )


def _only_where_something_waits(field: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || self.enabled || has(self.holdEmptyPoolSeconds)",
        f"{field} bounds waiting requests: set enabled or holdEmptyPoolSeconds, or remove {field}",
        field=f".{field}",
    )


class QuotaFileRef(Part):
    """A ConfigMap or Secret of the same namespace with the quotas, in the format of docs/flow-control.md."""

    name: DnsName
    """Name of the object, in this namespace."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "quotas.yaml"
    """Key in the object."""


class Quotas(Part):
    """The file with the quotas of clients. Changes apply without a restart; an invalid file changes nothing."""

    RULES = (
        Rule(
            "has(self.configMapRef) != has(self.secretRef)",
            "quotas are in one file: set either configMapRef or secretRef",
        ),
    )

    config_map_ref: QuotaFileRef | None = None
    """ConfigMap with the quotas."""
    secret_ref: QuotaFileRef | None = None
    """Secret with the quotas."""


class FlowControl(Part):
    """Settings for requests that wait in the picker, and for each client's share: docs/flow-control.md."""

    RULES = (
        forbidden(
            "!has(self.waitSeconds) || !has(self.endpointRequests)",
            "waitSeconds and endpointRequests exclude each other: remove one of them",
            field=".endpointRequests",
        ),
        _only_enabled("waitSeconds"),
        _only_enabled("endpointRequests"),
        _only_enabled("ttlSeconds"),
        _only_where_something_waits("maxRequests"),
        _only_where_something_waits("maxBytes"),
        forbidden(
            "!has(self.fairnessHeader) || self.enabled || has(self.quotas)",
            "fairnessHeader has no effect: set enabled or quotas, or remove it",
            field=".fairnessHeader",
        ),
        forbidden(
            f"!has(self.fairnessHeader) || !(self.fairnessHeader in {list(CREDENTIALS)})",
            "this header carries a secret, and client names appear in messages and traces: use another header",
            field=".fairnessHeader",
        ),
    )

    enabled: StrictBool = False
    """While all pods are full, requests wait in the picker, by priority and with equal tokens for each client."""
    wait_seconds: Seconds | None = None
    """A pod is full with more predicted seconds of work than this; default 1."""
    endpoint_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """A pod is full with this many requests; replaces waitSeconds."""
    max_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Waiting requests per pool and priority, then 429; default 5000."""
    max_bytes: Annotated[StrictInt, Field(ge=1, le=1 << 29)] | None = None
    """Bytes of waiting bodies per pool and priority; default 256 MiB."""
    ttl_seconds: Seconds | None = None
    """Longest wait for room, then 429; default 60."""
    hold_empty_pool_seconds: Seconds | None = None
    """Longest wait for a pool without a ready pod, then 503 (default: at once). Works without enabled."""
    fairness_header: HeaderName | None = None
    """Request header that names the client, for fairness and quotas; your Gateway must set it. Default:
    x-gateway-inference-fairness-id, if trustRequestHeaders is set."""
    quotas: Quotas | None = None
    """Tokens and requests per client; more get 429. The picker then reads response bodies to count output tokens."""


class PickerParameters(Part):
    """Parameters of the picker."""

    max_ttft_seconds: Annotated[StrictFloat, Field(gt=0, le=3600)] | None = None
    """Requests for Sheddable models get 429 when every usable endpoint's queue takes longer; default 30."""
    max_body_bytes: Annotated[StrictInt, Field(ge=1024, le=1 << 30)] | None = None
    """Longest request body; then 413."""
    trust_request_headers: StrictBool | None = None
    """Use the headers x-gateway-inference-objective and x-gateway-model-name-rewrite: who sends them chooses priority
    and model."""


class EndpointPicker(Part):
    """The picker, which chooses the pod for every request. Shared by the pools of a gateway."""

    RULES = (*parameter_rules(), *template_rules())

    policy: Policy = "treeline"
    """How a pod is chosen (docs/routing.md); treeline is the old name of predicted_ttft. Each pool of a gateway may
    have its own."""
    policy_parameters: PolicyParameters | None = None
    """Parameters of the policy."""
    parameters: PickerParameters = Field(default_factory=PickerParameters)
    """Parameters of the picker."""
    flow_control: FlowControl | None = None
    """Queues in the picker, and quotas (docs/flow-control.md)."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"
    """While no picker answers, FailOpen sends requests to any ready pod, FailClose refuses them."""
    replicas: Annotated[StrictInt, Field(ge=1, le=10)] = 1
    """Number of pickers."""
    resources: Resources | None = None
    """Resources of the picker."""
    image: Image | None = None
    """Image of the picker."""
    template: Annotated[dict[str, Any], WithJsonSchema(template_schema("`epp` is the picker"))] | None = None
    """PodTemplate fragment, merged into the picker's pods; its container is `epp`."""

    @property
    def chosen(self) -> str:
        """The policy with its parameters, as the picker's flag takes it."""
        given = self.policy_parameters.given if self.policy_parameters is not None else {}
        words = ",".join(f"{name}={value}" for name, value in given.items())
        return f"{self.policy}:{words}" if words else self.policy

    @property
    def heeds_caches(self) -> bool:
        """Whether the policy considers cached prefixes."""
        return self.policy in HEEDING


class Tls(Part):
    """TLS for clients."""

    secret_ref: NamedRef
    """Secret of type kubernetes.io/tls."""


class PickerTls(Part):
    """Mutual TLS between our own Envoy and the picker."""

    secret_ref: NamedRef
    """Secret with tls.crt, tls.key and ca.crt. The certificate needs server and client authentication and the name
    `<gateway>-epp.<namespace>.svc`. Every certificate signed by ca.crt may query the picker: use a CA of this gateway
    only."""


class ClientLimits(Part):
    """Limits of clients at our own Envoy."""

    receive_timeout_seconds: Annotated[StrictInt, Field(ge=1, le=3600)] = 60
    """Longest time for a request to arrive with its body, then 408."""
    connections: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 10_000
    """Connections of all clients to one Envoy."""
    requests_per_second: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Requests a second of one client (API key, or without keys address) at one Envoy, with bursts of two seconds'
    worth; then 429."""
    unanswered_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 1000
    """Requests in flight of one client at one picker, then 429. They count until the answer ends, without API keys
    until it begins."""


class Standalone(Part):
    """The Envoy that the operator runs. Shared by the pools of a gateway."""

    RULES = (
        *template_rules(),
        forbidden(
            "!has(self.annotations)"
            " || self.annotations.all(k, !k.startsWith('treeline.dev/') && !k.startsWith('kubectl.kubernetes.io/'))",
            "annotations of treeline.dev and kubectl.kubernetes.io are reserved: remove them from annotations",
            field=".annotations",
        ),
        Rule(
            f"!has(self.annotations) || self.annotations.all(k, k.matches('{QUALIFIED_NAME_PATTERN}'))",
            NO_QUALIFIED_NAME,
            field=".annotations",
        ),
    )

    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service in front of Envoy."""
    port: Port = 80
    """Port of the Service."""
    replicas: Annotated[StrictInt, Field(ge=1, le=20)] = 1
    """Number of Envoys."""
    resources: Resources | None = None
    """Resources of Envoy."""
    image: Image | None = None
    """Image of Envoy."""
    template: Annotated[dict[str, Any], WithJsonSchema(template_schema("`edge` is Envoy"))] | None = None
    """PodTemplate fragment, merged into Envoy's pods; its container is `edge`."""
    annotations: Annotated[dict[str, Text], Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of the Service, for the cloud's load balancer."""
    api_keys_secret_ref: NamedRef | None = None
    """Secret with an entry per client: its name and API key. Without it everybody who reaches the Service is served."""
    tls: Tls | None = None
    """TLS for clients; default plain HTTP."""
    picker_tls: PickerTls | None = None
    """Mutual TLS between Envoy and the picker; default plain text, protected by NetworkPolicies only."""
    limits: ClientLimits = Field(default_factory=ClientLimits)
    """Limits of clients. Envoy's memory is the limit in `resources`: default 1Gi, or eight times
    `endpointPicker.parameters.maxBodyBytes` if that is more."""
    expose_routing: StrictBool = False
    """Send `x-treeline-endpoint` and `x-treeline-cached-tokens` to clients. They reveal pod addresses and whether
    another client sent the same prompt."""
    console: StrictBool = False
    """A playground for browsers at `/`. Load, prefixes and decisions are at `/console/` of port 9004 of a picker's pod
    only."""


class ParentRef(Part):
    """A Gateway (Gateway API) whose listeners serve the pool."""

    group: Annotated[str, StringConstraints(pattern=rf"^$|{DNS_NAME_PATTERN}", max_length=253)] = (
        "gateway.networking.k8s.io"
    )
    """API group of the parent."""
    kind: Annotated[
        str, StringConstraints(pattern=r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", min_length=1, max_length=63)
    ] = "Gateway"
    """Kind of the parent."""
    namespace: DnsLabel | None = None
    """Namespace of the parent; default the pool's."""
    name: DnsName
    """Name of the parent."""
    section_name: DnsName | None = None
    """One listener of the parent; default all."""
    port: Port | None = None
    """Port of the parent's listeners; default all."""


Hostname = Annotated[str, StringConstraints(pattern=r"^(\*\.)?" + DNS_NAME_PATTERN[1:], min_length=1, max_length=253)]


class Gateway(Part):
    """Access for clients: through an Envoy of our own, or an existing Gateway."""

    RULES = (
        Rule(
            "!has(self.isolation) || self.isolation == 'Shared'"
            " || (has(self.standalone) && has(self.standalone.apiKeysSecretRef))",
            "isolation needs API keys: set standalone.apiKeysSecretRef, or remove isolation",
            field=".isolation",
        ),
        forbidden(
            "!has(self.standalone) || !has(self.parentRefs) || self.parentRefs.size() == 0",
            "with parentRefs your Gateway serves the pool, not our own Envoy: remove standalone or parentRefs",
        ),
        forbidden(
            "!has(self.hostnames) || self.hostnames.size() == 0"
            " || (has(self.parentRefs) && self.parentRefs.size() > 0)",
            "our own Envoy serves every host name: remove hostnames, or set parentRefs",
            field=".hostnames",
        ),
        Rule(
            "!has(self.parentRefs) || self.parentRefs.all(a, self.parentRefs.exists_one(b, a == b))",
            "a parent is named twice: remove one of them",
            field=".parentRefs",
        ),
    )

    name: Annotated[str, StringConstraints(pattern=SHORT_NAME_PATTERN, min_length=1, max_length=MAX_NAME)] = "treeline"
    """Pools of a namespace with the same gateway name share a picker and a URL. The oldest pool's settings hold; for
    API keys, TLS, isolation and failureMode the strictest. A new name moves the pool to another URL at once."""
    standalone: Standalone | None = None
    """Our own Envoy. Not with parentRefs."""
    parent_refs: Annotated[tuple[ParentRef, ...], Field(max_length=16)] = ()
    """Gateways (Gateway API) in place of our own Envoy."""
    hostnames: Annotated[tuple[Hostname, ...], Field(max_length=16, json_schema_extra=SET)] = ()
    """Host names of the HTTPRoute. Only with parentRefs."""

    isolation: Literal["PerKey", "Shared"] | None = None
    """PerKey (default with API keys): each key has its own prefix cache. Shared (default without): one cache for all;
    hits are hidden from clients unless exposeRouting is set, but response times reveal them."""
    unprotected: Annotated[
        tuple[Literal["ApiKeys", "Tls", "PickerTls", "Isolation", "FailClose"], ...],
        Field(max_length=5, json_schema_extra=SET),
    ] = ()
    """Protections of deleted pools to drop. They stay in force until another pool sets them or lists them here."""

    @property
    def has_clients(self) -> bool:
        """Whether our own Envoy identifies clients by API keys."""
        return self.mode == "standalone" and self.edge.api_keys_secret_ref is not None

    @property
    def kept_apart(self) -> bool:
        """Whether each client has its own cache."""
        return self.has_clients and self.isolation != "Shared"

    @property
    def mode(self) -> Literal["standalone", "gateway-api"]:
        return "gateway-api" if self.parent_refs else "standalone"

    @property
    def edge(self) -> Standalone:
        """The settings of our own Envoy; the defaults if absent."""
        return self.standalone or Standalone()


COLLECTOR_PATTERN: Final = rf"^http://{DNS_NAME_PATTERN[1:-1]}(:{PORT_PATTERN})?$"


class Tracing(Part):
    """OpenTelemetry traces of requests."""

    endpoint: Annotated[str, StringConstraints(pattern=COLLECTOR_PATTERN, max_length=253)]
    """The collector, OTLP over plain-text gRPC: http://HOST:4317."""
    ratio: Annotated[StrictFloat, Field(ge=0, le=1)] = tracing_env.RATIO
    """Sampled share of the requests without a trace."""

    @property
    def collector(self) -> tuple[str, int]:
        """Host and port."""
        return tracing_env.collector(self.endpoint)

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """OpenTelemetry's environment variables for it."""
        return (
            (tracing_env.ENDPOINT[1], self.endpoint),
            (tracing_env.SAMPLER, "parentbased_traceidratio"),
            (tracing_env.SAMPLER_ARG, f"{self.ratio:g}"),
        )
