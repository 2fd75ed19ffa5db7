"""Owns what the pools of a gateway share: the picker, our own Envoy, the parents of Gateway API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StringConstraints, WithJsonSchema
from treeline_wire import tracing_env

from treeline_operator.api.engine import Image, Text
from treeline_operator.api.flow_control import FlowControl
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
)
from treeline_operator.api.picker_policy import HEEDING, Policy, PolicyParameters, parameter_rules
from treeline_operator.api.rules import Rule, forbidden
from treeline_operator.api.template import template_rules, template_schema
from treeline_operator.names import MAX_NAME


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
