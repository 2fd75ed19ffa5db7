"""Owns the InferencePool: its fields, their defaults and bounds, and what a field means for each engine."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from treeline_operator.api.parts import (
    Condition,
    DnsLabel,
    DnsName,
    KeyRef,
    NamedRef,
    ObjectMeta,
    Part,
    Quantity,
    Resource,
    Resources,
    Toleration,
)

Uri = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Text = Annotated[str, StringConstraints(max_length=1024)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512)]
EngineType = Literal["treeline", "sglang", "vllm", "custom"]
Scheme = Literal["hf", "pvc", "path", "builtin"]


class Source(NamedTuple):
    """A model URI taken apart. ``root`` is the repository, claim, directory or built-in name, ``path`` what is in it."""

    scheme: Scheme
    root: str
    path: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, uri: str) -> Source:
        """Raises ValueError."""
        scheme, separator, rest = uri.partition("://")
        match scheme if separator and rest else "":
            case "hf":
                repository, _, revision = rest.partition("@")
                return cls("hf", repository, revision=revision)
            case "pvc":
                claim, _, path = rest.partition("/")
                return cls("pvc", claim, path.strip("/"))
            case "path":
                return cls("path", rest)
            case "builtin":
                return cls("builtin", rest)
        raise ValueError(f"{uri!r} is no model URI; write hf://, pvc://, path:// or builtin://")

    @property
    def last(self) -> str:
        """The last part, by which the model is called where no name is given."""
        return (self.path or self.root).rstrip("/").rsplit("/", 1)[-1]


class Cache(Part):
    """Where downloaded weights stay between pods: a claim that exists, or one that is made for the pool."""

    claim_name: DnsName | None = None
    """A PersistentVolumeClaim of this namespace that exists. It is never deleted with the pool."""
    size: Quantity | None = None
    """Size of the claim to make. It belongs to the pool and goes with it."""
    storage_class_name: DnsName | None = None
    """Storage class of the claim to make; absent means the cluster's default."""
    access_modes: Annotated[
        tuple[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"], ...],
        Field(max_length=4),
    ] = ()
    """Access modes of the claim to make; absent means ReadWriteOnce. More than one replica on several nodes needs ReadWriteMany."""


class ModelSource(Part):
    """The model that the pool serves."""

    uri: Uri
    """Where the weights are: `hf://org/name[@revision]`, `pvc://claim/path`, `path:///directory` (in the image or mounted by the template) or `builtin://tiny`."""
    name: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")] | None = None
    """Name under which clients ask for the model; absent means the last part of the uri."""
    tokenizer: Uri | None = None
    """Where the tokenizer is, if not with the weights."""
    token_secret_ref: KeyRef | None = None
    """Secret with the Hugging Face token, for gated models. The operator never reads it; the kubelet hands it to the download only."""
    cache: Cache | None = None
    """Volume that keeps the downloaded weights; absent means that every pod downloads anew into an emptyDir."""
    size: Quantity | None = None
    """Size of the weights, for example `16Gi`. It sets how long a start may take and how much disk a pod asks for."""

    @property
    def source(self) -> Source:
        return Source.parse(self.uri)

    @property
    def served_name(self) -> str:
        return self.name or self.source.last


class Accelerator(Part):
    """What a pod computes on."""

    type: Literal["cpu", "nvidia"] = "cpu"
    """Kind of device."""
    count: Annotated[int, Field(ge=1, le=16)] = 1
    """Devices per pod."""
    class_: Annotated[str, StringConstraints(max_length=63)] | None = Field(None, alias="class")
    """Product of the device: value of the node label `nvidia.com/gpu.product`."""
    runtime_class_name: DnsName | None = None
    """RuntimeClass of the pods, where the device needs one."""
    resource_name: Annotated[str, StringConstraints(max_length=253)] = "nvidia.com/gpu"
    """Extended resource by which the device is asked for."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    """Taints of the nodes that have the device."""

    @property
    def is_gpu(self) -> bool:
        return self.type != "cpu"


class Adapter(Part):
    """A LoRA adapter."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")]
    """Name under which clients ask for the adapter."""
    uri: Uri
    """Where the adapter's weights are."""


class Engine(Part):
    """The server in the pods and its settings. A setting that the engine does not have is refused."""

    type: EngineType = "treeline"
    """Which server runs."""
    image: Image | None = None
    """Image of the runtime container; absent means the operator's default for the engine. `custom` needs one."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled."""
    command: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Replaces the image's entry point."""
    args: Annotated[tuple[Text, ...], Field(max_length=128)] = ()
    """Arguments that follow those made from the settings."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 8000
    """Port of the OpenAI API in the pod."""
    context_length: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt and answer together, in tokens."""
    memory_fraction: Annotated[float, Field(ge=0.05, le=0.99)] | None = None
    """Part of the device's memory for weights and KV cache."""
    page_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens per page of the KV cache."""
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """Devices over which each layer is split."""
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of the model in one pod."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    """Requests that are computed at once."""
    max_queued_requests: Annotated[int, Field(ge=0)] | None = None
    """Requests that may wait; one more is refused."""
    chunked_prefill_size: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of prompt in one step."""
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that the KV cache holds."""
    dtype: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=32)] | None = None
    """Number format of weights and activations, in the engine's words."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of computation."""
    eviction_policy: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+$", max_length=32)] | None = None
    """Which pages leave the prefix cache first, in the engine's words."""
    schedule_policy: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+$", max_length=32)] | None = None
    """Which waiting request is next, in the engine's words."""
    adapters: Annotated[tuple[Adapter, ...], Field(max_length=64)] = ()
    """LoRA adapters that are served beside the model."""
    resources: Resources | None = None
    """Resources of the runtime container."""


class PickerParameters(Part):
    """Parameters of the picker."""

    max_ttft_seconds: Annotated[float, Field(gt=0, le=3600)] | None = None
    """A request whose first token is expected later than this is refused at once."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] | None = None
    """Longest request body; a longer one is answered 413."""


class EndpointPicker(Part):
    """The picker, which chooses the pod for every request. Shared by the pools of a gateway."""

    policy: Literal["treeline", "round_robin", "random"] = "treeline"
    """How a pod is chosen: by cached prefix and load, in turn, or by chance."""
    parameters: PickerParameters = Field(default_factory=PickerParameters)
    """Parameters of the picker."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"
    """Without a picker: FailOpen sends requests to any ready pod, FailClose refuses them."""
    replicas: Annotated[int, Field(ge=1, le=10)] = 1
    """Pickers. Each builds its own view of the caches."""
    resources: Resources | None = None
    """Resources of the picker's container."""
    image: Image | None = None
    """Image of the picker; absent means the operator's default."""


class Tls(Part):
    """TLS towards the clients."""

    secret_ref: NamedRef
    """Secret of type kubernetes.io/tls. The operator never reads it; Envoy mounts it."""


class Standalone(Part):
    """The Envoy that the operator runs. Shared by the pools of a gateway."""

    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service in front of Envoy."""
    port: Annotated[int, Field(ge=1, le=65535)] = 80
    """Port of the Service."""
    replicas: Annotated[int, Field(ge=1, le=20)] = 1
    """Envoys."""
    resources: Resources | None = None
    """Resources of Envoy's container."""
    image: Image | None = None
    """Image of Envoy; absent means the operator's default."""
    annotations: Annotated[dict[str, Text], Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of the Service, for the cloud's load balancer."""
    api_keys_secret_ref: NamedRef | None = None
    """Secret with an API key per client: key = client's name, value = API key. Absent means that anybody who reaches the Service is served."""
    tls: Tls | None = None
    """TLS towards the clients; absent means plain HTTP."""


class ParentRef(Part):
    """A Gateway (Gateway API) whose listeners serve the pool."""

    group: Annotated[str, StringConstraints(max_length=253)] = "gateway.networking.k8s.io"
    """API group of the parent."""
    kind: Annotated[str, StringConstraints(min_length=1, max_length=63)] = "Gateway"
    """Kind of the parent."""
    namespace: DnsLabel | None = None
    """Namespace of the parent; absent means the pool's."""
    name: DnsName
    """Name of the parent."""
    section_name: DnsName | None = None
    """One listener of the parent; absent means all."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the parent's listeners; absent means all."""


Hostname = Annotated[
    str,
    StringConstraints(
        pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        min_length=1,
        max_length=253,
    ),
]


class Gateway(Part):
    """How clients reach the pool: an Envoy of our own, or a Gateway that exists."""

    name: Annotated[
        str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=40)
    ] = "treeline"
    """Pools of a namespace with the same gateway name share a picker and a URL. Where their settings conflict, the oldest pool's hold."""
    standalone: Standalone | None = None
    """Settings of our own Envoy. Not with parentRefs."""
    parent_refs: Annotated[tuple[ParentRef, ...], Field(max_length=16)] = ()
    """Gateways (Gateway API) to attach to, instead of an Envoy of our own."""
    hostnames: Annotated[tuple[Hostname, ...], Field(max_length=16)] = ()
    """Host names of the HTTPRoute. Only with parentRefs."""

    @property
    def mode(self) -> Literal["standalone", "gateway-api"]:
        return "gateway-api" if self.parent_refs else "standalone"

    @property
    def edge(self) -> Standalone:
        """The settings of our own Envoy, where it is used; the defaults if nothing is said of it."""
        return self.standalone or Standalone()


class Hpa(Part):
    """A HorizontalPodAutoscaler (autoscaling/v2) that owns the replicas."""

    metrics: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=16)]
    """Metrics, each an autoscaling/v2 MetricSpec."""
    behavior: dict[str, Any] | None = None
    """How fast it scales: an autoscaling/v2 HorizontalPodAutoscalerBehavior."""


class Keda(Part):
    """A KEDA ScaledObject that owns the replicas."""

    triggers: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=16)]
    """Triggers, each a trigger of a keda.sh/v1alpha1 ScaledObject."""
    polling_interval: Annotated[int, Field(ge=1)] | None = None
    """Seconds between looks at the triggers."""
    cooldown_period: Annotated[int, Field(ge=0)] | None = None
    """Seconds after the last active trigger until the pool goes to zero."""


class Autoscaling(Part):
    """Who owns the replicas."""

    type: Literal["None", "HPA", "KEDA"] = "None"
    """None: you, by spec.replicas. HPA and KEDA: an object that the operator makes and that sets spec.replicas."""
    min_replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Fewest replicas; absent means 1. Zero needs KEDA."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Most replicas."""
    hpa: Hpa | None = None
    """Settings of type HPA."""
    keda: Keda | None = None
    """Settings of type KEDA."""


class Drain(Part):
    """How a pod ends."""

    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Longest time that running requests get to end. Grace period, preStop and timeouts follow from it."""


class Rollout(Part):
    """How a change reaches the pods."""

    strategy: Literal["SurgeIfCapacity", "Replace"] = "SurgeIfCapacity"
    """SurgeIfCapacity starts new pods beside the old ones where there is room, else replaces; Replace takes an old pod away first."""
    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    """Pods above replicas while rolling."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    """Pods below replicas while rolling."""
    paused: bool = False
    """Keep old and new pods as they are."""
    template_version: Annotated[int, Field(ge=1)] | None = None
    """Use at least this version of the operator's pod template. An operator upgrade rolls no pods until this is raised."""


class Role(Part):
    """One role of a pool that separates prefill from decode."""

    name: Literal["both", "prefill", "decode"]
    """What the pods of this role do."""
    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Pods of this role."""


class PoolSpec(Part):
    """What the pool is to be."""

    model: ModelSource
    """The model that the pool serves."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Pods. Also set through the scale subresource, by `kubectl scale` and autoscalers."""
    template: dict[str, Any] | None = None
    """Fragment of a PodTemplate (`metadata`, `spec`), merged into the pods; containers by name, the engine's is `runtime`."""
    accelerator: Accelerator = Field(default_factory=Accelerator)
    """What a pod computes on."""
    engine: Engine = Field(default_factory=Engine)
    """The server in the pods."""
    endpoint_picker: EndpointPicker = Field(default_factory=EndpointPicker)
    """The picker of the gateway."""
    gateway: Gateway = Field(default_factory=Gateway)
    """How clients reach the pool."""
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    """Who owns the replicas."""
    drain: Drain = Field(default_factory=Drain)
    """How a pod ends."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How a change reaches the pods."""
    roles: Annotated[tuple[Role, ...], Field(max_length=3)] = ()
    """Roles of the pods; absent means that every pod does both."""


class EndpointStatus(TypedDict):
    """A pod as the picker sees it."""

    name: str
    address: str
    ready: bool
    serving: bool


class GatewayStatus(TypedDict, total=False):
    """The gateway that the pool shares."""

    name: str
    epp: str
    owner: str


class DownloadStatus(TypedDict, total=False):
    """How far the download of the weights is."""

    percent: int
    bytesDone: int
    bytesTotal: int


class PoolStatus(TypedDict, total=False):
    """What the pool is."""

    observedGeneration: int
    conditions: list[Condition]
    replicas: int
    readyReplicas: int
    selector: str
    url: str
    modelName: str
    revision: str
    templateVersion: int
    endpoints: list[EndpointStatus]
    gateway: GatewayStatus
    download: DownloadStatus


class InferencePool(Resource):
    """A model served by a set of equal pods behind one URL."""

    kind: Literal["InferencePool"] = "InferencePool"
    metadata: ObjectMeta
    spec: PoolSpec
    status: PoolStatus = Field(default_factory=PoolStatus)


KIND: Final = "InferencePool"
