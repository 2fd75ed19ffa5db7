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
"""Parameter → the policies that have it. For the others it is refused, as the picker would."""

HEEDING: Final = frozenset({"treeline", "predicted_ttft", "cache_aware", "lora_affinity"})
"""Policies that look at what the pods hold of a prompt. `prefix_hash` reads prompts, too, and needs no tokenizer."""

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
    """cache_aware: the share of a prompt that must be cached for its pod to be chosen. Absent means 0.3."""
    balance_abs_threshold: Number | None = None
    """cache_aware (64 requests) and bucket (32 characters): loads that differ by no more are even."""
    balance_rel_threshold: Factor | None = None
    """cache_aware (1.5) and bucket (1.0001): nor are they uneven up to this factor."""
    prefix_token_count: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """prefix_hash: tokens of the prompt that count. Absent means 256."""
    load_factor: Factor | None = None
    """prefix_hash and consistent_hashing: no pod has more than so many times the average load. Absent means 1.25."""
    bucket_adjust_interval_secs: Annotated[StrictFloat, Field(gt=0, le=86400)] | None = None
    """bucket: how often the ranges of lengths are set anew. Absent means 5."""
    load_s: Number | None = None
    """lora_affinity: seconds that loading an adapter costs. Absent means 1."""
    remember_s: Number | None = None
    """lora_affinity: how long a pod to which a request was sent is taken to have its adapter. Absent means 60."""

    @property
    def given(self) -> dict[str, str]:
        """Those that are set, by the picker's names."""
        found = self.model_dump(exclude_none=True)
        return {name: f"{value:.12g}" if isinstance(value, float) else str(value) for name, value in found.items()}


Seconds = Annotated[StrictFloat, Field(gt=0, le=3600)]
"""As long as our own Envoy lets a request wait."""
HeaderName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]


def _only_enabled(field: str, what: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || self.enabled",
        f"{field} says {what}, and none does: set enabled, or remove {field}",
        field=f".{field}",
    )


def _only_where_something_waits(field: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || self.enabled || has(self.holdEmptyPoolSeconds)",
        f"{field} bounds what waits, and nothing does: set enabled or holdEmptyPoolSeconds, or remove {field}",
        field=f".{field}",
    )


class QuotaFileRef(Part):
    """A ConfigMap or Secret of the same namespace with the quotas, in the format of docs/flow-control.md."""

    name: DnsName
    """Name of the object, in the namespace of this one."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "quotas.yaml"
    """Key within it."""


class Quotas(Part):
    """Where the quotas of clients are. A change is followed without a restart; what cannot be read changes nothing."""

    RULES = (
        Rule(
            "has(self.configMapRef) != has(self.secretRef)",
            "quotas are in one file: set configMapRef or secretRef, and not both",
        ),
    )

    config_map_ref: QuotaFileRef | None = None
    """In a ConfigMap."""
    secret_ref: QuotaFileRef | None = None
    """In a Secret. The operator never reads it; the picker mounts it."""


class FlowControl(Part):
    """Which requests wait in the picker, how long, and how much each client may have: docs/flow-control.md."""

    RULES = (
        forbidden(
            "!has(self.waitSeconds) || !has(self.endpointRequests)",
            "a pod is full by its predicted work or by its requests: remove waitSeconds or endpointRequests",
            field=".endpointRequests",
        ),
        _only_enabled("waitSeconds", "when a request waits"),
        _only_enabled("endpointRequests", "when a request waits"),
        _only_enabled("ttlSeconds", "how long a request waits for room"),
        _only_where_something_waits("maxRequests"),
        _only_where_something_waits("maxBytes"),
        forbidden(
            "!has(self.fairnessHeader) || self.enabled || has(self.quotas)",
            "nothing asks whose a request is: set enabled or quotas, or remove fairnessHeader",
            field=".fairnessHeader",
        ),
        forbidden(
            f"!has(self.fairnessHeader) || !(self.fairnessHeader in {list(CREDENTIALS)})",
            "this header carries a secret, and a client's name is told in messages and traces: name another",
            field=".fairnessHeader",
        ),
    )

    enabled: StrictBool = False
    """Requests wait in the picker while every pod that may serve them is full: by priority, and within a priority each
    client gets as many tokens as the others that wait. Off: they wait in the pods, in the order in which they came."""
    wait_seconds: Seconds | None = None
    """A pod is full with more than so much work before a request, as the picker predicts. Absent means 1."""
    endpoint_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """A pod is full with so many requests, whatever work they are: instead of waitSeconds."""
    max_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Requests that may wait for one pool at one priority; more are answered 429. Absent means 5000."""
    max_bytes: Annotated[StrictInt, Field(ge=1, le=1 << 29)] | None = None
    """Bytes of their bodies, counted alike. Absent means 256 MiB."""
    ttl_seconds: Seconds | None = None
    """How long a request waits for room before it is answered 429. Absent means 60."""
    hold_empty_pool_seconds: Seconds | None = None
    """How long a request waits for a pool without a ready pod, as one that was scaled to zero, before it is answered
    503; not only where enabled. Absent: it is answered at once."""
    fairness_header: HeaderName | None = None
    """Request header that says whose a request is, for fairness and quotas. Whoever can send it chooses: have your
    Gateway set it. Not with API keys, by whose names clients are told apart. Absent: trustRequestHeaders decides
    whether x-gateway-inference-fairness-id is believed."""
    quotas: Quotas | None = None
    """Tokens and requests that each client may have; more is answered 429. Clients are told apart as for fairness. Our
    own Envoy then shows responses to the picker, piece by piece: it counts what outputs took."""


class PickerParameters(Part):
    """Parameters of the picker."""

    max_ttft_seconds: Annotated[StrictFloat, Field(gt=0, le=3600)] | None = None
    """A request for a Sheddable model is answered 429 when the queue alone of every endpoint that it may use would take
    longer than this; its own prefill does not count. Other requests wait. Absent means 30."""
    max_body_bytes: Annotated[StrictInt, Field(ge=1024, le=1 << 30)] | None = None
    """Longest request body; a longer one is answered 413."""
    trust_request_headers: StrictBool | None = None
    """Believe the headers x-gateway-inference-objective and x-gateway-model-name-rewrite: whoever can send them chooses
    a request's priority by the name of an InferenceObjective, and its model. Absent: they are not believed."""


class EndpointPicker(Part):
    """The picker, which chooses the pod for every request. Shared by the pools of a gateway."""

    RULES = (*parameter_rules(), *template_rules())

    policy: Policy = "treeline"
    """How a pod of this pool is chosen. predicted_ttft, of which treeline is another name: by cached prefix and load.
    The others are for comparisons and for needs of their own; docs/routing.md says when which. Pools that share a
    picker need not have the same."""
    policy_parameters: PolicyParameters | None = None
    """Parameters of the policy."""
    parameters: PickerParameters = Field(default_factory=PickerParameters)
    """Parameters of the picker."""
    flow_control: FlowControl | None = None
    """Requests that wait in the picker, and quotas; absent: none waits, and there are none."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"
    """Without a picker: FailOpen sends requests to any ready pod, FailClose refuses them."""
    replicas: Annotated[StrictInt, Field(ge=1, le=10)] = 1
    """Pickers. Each builds its own view of the caches."""
    resources: Resources | None = None
    """Resources of the picker's container."""
    image: Image | None = None
    """Image of the picker; absent means the operator's default."""
    template: Annotated[dict[str, Any], WithJsonSchema(template_schema("`epp` is the picker"))] | None = None
    """Fragment of a PodTemplate, merged into the picker's pods: containers by name, the picker's is `epp`."""

    @property
    def chosen(self) -> str:
        """The policy with its parameters, as the picker's flag takes it."""
        given = self.policy_parameters.given if self.policy_parameters is not None else {}
        words = ",".join(f"{name}={value}" for name, value in given.items())
        return f"{self.policy}:{words}" if words else self.policy

    @property
    def heeds_caches(self) -> bool:
        """Whether it matters to the policy what pods hold of a prompt."""
        return self.policy in HEEDING


class Tls(Part):
    """TLS towards the clients."""

    secret_ref: NamedRef
    """Secret of type kubernetes.io/tls. The operator never reads it; Envoy mounts it."""


class PickerTls(Part):
    """Mutual TLS between our own Envoy and the picker."""

    secret_ref: NamedRef
    """Secret with tls.crt, tls.key and ca.crt, which both mount; the operator never reads it. The certificate is for
    server and client authentication and valid for `<gateway>-epp.<namespace>.svc`. Whoever has a certificate signed by
    ca.crt may ask the picker: use an authority of the gateway's own. Changes are taken without a restart."""


class ClientLimits(Part):
    """What clients may ask of our own Envoy at most."""

    receive_timeout_seconds: Annotated[StrictInt, Field(ge=1, le=3600)] = 60
    """How long a request may take to arrive, its body included; then it is answered 408. An answer may take as long as
    it takes."""
    connections: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 10_000
    """Connections of all clients together to one Envoy; more are closed at once."""
    requests_per_second: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    """Requests of one client a second at one Envoy, of which two seconds' worth may come at once; more are answered
    429. A client is who has an API key, and without keys an address. Absent means any number."""
    unanswered_requests: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 1000
    """Requests of one client at one picker; more are answered 429. A request with an API key counts until its answer
    has ended, and one without until it begins."""


class Standalone(Part):
    """The Envoy that the operator runs. Shared by the pools of a gateway."""

    RULES = (
        *template_rules(),
        forbidden(
            "!has(self.annotations)"
            " || self.annotations.all(k, !k.startsWith('treeline.dev/') && !k.startsWith('kubectl.kubernetes.io/'))",
            "annotations of treeline.dev and kubectl.kubernetes.io are the operator's and kubectl's:"
            " remove them from annotations",
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
    """Envoys."""
    resources: Resources | None = None
    """Resources of Envoy's container."""
    image: Image | None = None
    """Image of Envoy; absent means the operator's default."""
    template: Annotated[dict[str, Any], WithJsonSchema(template_schema("`edge` is Envoy"))] | None = None
    """Fragment of a PodTemplate, merged into Envoy's pods: containers by name, Envoy's is `edge`."""
    annotations: Annotated[dict[str, Text], Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of the Service, for the cloud's load balancer."""
    api_keys_secret_ref: NamedRef | None = None
    """Secret with an API key per client: its keys are the clients' names, its values the API keys. Absent means that
    anybody who reaches the Service is served."""
    tls: Tls | None = None
    """TLS towards the clients; absent means plain HTTP."""
    picker_tls: PickerTls | None = None
    """Mutual TLS between Envoy and the picker; absent means plain text, which the NetworkPolicies alone protect."""
    limits: ClientLimits = Field(default_factory=ClientLimits)
    """What clients may ask at most. The memory for all requests together follows from the limit in `resources`, which
    is 1Gi where none is given, or eight times `endpointPicker.parameters.maxBodyBytes` if that is more."""
    expose_routing: StrictBool = False
    """Response headers `x-treeline-endpoint` (the pod that served) and `x-treeline-cached-tokens`, to see the routing.
    Off, because they tell clients addresses of pods, and whether somebody else has asked the same before."""
    console: StrictBool = False
    """A page for browsers at `/`: a playground that asks what any client may ask. Load, prefixes and decisions are not
    shown there, but at `/console/` of port 9004 of a picker's pod, by `kubectl port-forward`."""


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
    """Namespace of the parent; absent means the pool's."""
    name: DnsName
    """Name of the parent."""
    section_name: DnsName | None = None
    """One listener of the parent; absent means all."""
    port: Port | None = None
    """Port of the parent's listeners; absent means all."""


Hostname = Annotated[str, StringConstraints(pattern=r"^(\*\.)?" + DNS_NAME_PATTERN[1:], min_length=1, max_length=253)]


class Gateway(Part):
    """How clients reach the pool: an Envoy of our own, or a Gateway that exists."""

    RULES = (
        Rule(
            "!has(self.isolation) || self.isolation == 'Shared'"
            " || (has(self.standalone) && has(self.standalone.apiKeysSecretRef))",
            "without API keys there are no clients to keep apart: set standalone.apiKeysSecretRef, or remove isolation",
            field=".isolation",
        ),
        forbidden(
            "!has(self.standalone) || !has(self.parentRefs) || self.parentRefs.size() == 0",
            "parentRefs means that your Gateway serves the pool and no Envoy of ours runs:"
            " remove standalone, or remove parentRefs",
        ),
        forbidden(
            "!has(self.hostnames) || self.hostnames.size() == 0"
            " || (has(self.parentRefs) && self.parentRefs.size() > 0)",
            "host names are matched by a Gateway; our own Envoy serves every name: remove hostnames, or set parentRefs",
            field=".hostnames",
        ),
        Rule(
            "!has(self.parentRefs) || self.parentRefs.all(a, self.parentRefs.exists_one(b, a == b))",
            "a parent is named twice: remove one of them",
            field=".parentRefs",
        ),
    )

    name: Annotated[str, StringConstraints(pattern=SHORT_NAME_PATTERN, min_length=1, max_length=MAX_NAME)] = "treeline"
    """Pools of a namespace with the same gateway name share a picker and a URL. Where their settings conflict, those of
    the oldest pool hold; of API keys, TLS, isolation and failureMode the strictest. A pool that is given another name
    leaves its former URL at once: move its clients first (a second pool behind the new gateway), where that matters."""
    standalone: Standalone | None = None
    """Settings of our own Envoy. Not with parentRefs."""
    parent_refs: Annotated[tuple[ParentRef, ...], Field(max_length=16)] = ()
    """Gateways (Gateway API) to attach to, instead of an Envoy of our own."""
    hostnames: Annotated[tuple[Hostname, ...], Field(max_length=16, json_schema_extra=SET)] = ()
    """Host names of the HTTPRoute. Only with parentRefs."""

    isolation: Literal["PerKey", "Shared"] | None = None
    """Whose prompts a client's requests find in the caches. PerKey: its own alone, each API key's client has a cache of
    its own. Shared: everybody's, and what a request found is told to nobody, unless exposeRouting is set; how fast an
    answer comes tells it still. Absent means PerKey where there are API keys, else Shared."""
    unprotected: Annotated[
        tuple[Literal["ApiKeys", "Tls", "PickerTls", "Isolation", "FailClose"], ...],
        Field(max_length=5, json_schema_extra=SET),
    ] = ()
    """Protections that the gateway may lose. What a pool stated for the gateway stays in force after that pool is gone,
    unless another pool states it, or lists it here: ApiKeys, Tls and PickerTls (of standalone), Isolation (PerKey),
    FailClose (endpointPicker.failureMode). It turns nothing off that a pool states."""

    @property
    def has_clients(self) -> bool:
        """Whether our own Envoy knows its clients by their keys."""
        return self.mode == "standalone" and self.edge.api_keys_secret_ref is not None

    @property
    def kept_apart(self) -> bool:
        """Whether each client has a cache of its own."""
        return self.has_clients and self.isolation != "Shared"

    @property
    def mode(self) -> Literal["standalone", "gateway-api"]:
        return "gateway-api" if self.parent_refs else "standalone"

    @property
    def edge(self) -> Standalone:
        """The settings of our own Envoy, where it is used; the defaults if nothing is said of it."""
        return self.standalone or Standalone()


COLLECTOR_PATTERN: Final = rf"^http://{DNS_NAME_PATTERN[1:-1]}(:{PORT_PATTERN})?$"


class Tracing(Part):
    """OpenTelemetry traces of requests."""

    endpoint: Annotated[str, StringConstraints(pattern=COLLECTOR_PATTERN, max_length=253)]
    """The collector, which takes OTLP over gRPC in plain text: http://HOST:4317."""
    ratio: Annotated[StrictFloat, Field(ge=0, le=1)] = tracing_env.RATIO
    """Of the requests that come without a trace, so many begin one; of the others their senders have decided."""

    @property
    def collector(self) -> tuple[str, int]:
        """Host and port."""
        return tracing_env.collector(self.endpoint)

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """What tells a program of it that goes by OpenTelemetry's variables."""
        return (
            (tracing_env.ENDPOINT[1], self.endpoint),
            (tracing_env.SAMPLER, "parentbased_traceidratio"),
            (tracing_env.SAMPLER_ARG, f"{self.ratio:g}"),
        )
