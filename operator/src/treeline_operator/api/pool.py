"""Owns the InferencePool: a model served by a set of equal pods behind one URL."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StringConstraints, WithJsonSchema
from treeline_wire import labels, ports
from typing_extensions import TypedDict

from treeline_operator.api.engine import TENSOR_PARALLEL_FLAGS, Accelerator, Engine
from treeline_operator.api.gateway import EndpointPicker, Gateway, Tracing
from treeline_operator.api.lifecycle import Autoscaling, DisruptionBudget, Drain, Rollout
from treeline_operator.api.parts import (
    BY_TYPE,
    DOCUMENTED,
    SHORT_NAME_PATTERN,
    Condition,
    DnsLabel,
    ObjectMeta,
    Part,
    Resource,
    template_rules,
    template_schema,
)
from treeline_operator.api.prefill import PREFILL_RULES, Prefill
from treeline_operator.api.rules import Rule, forbidden
from treeline_operator.api.source import ModelSource, is_downloaded
from treeline_operator.names import MAX_NAME

KIND: Final = "InferencePool"

_TEMPLATE: Final = template_schema(
    "`runtime` is the engine's",
    "; custom engines may set those of KV events (docs/engines.md)",
)


_OTHER_SPLITS: Final = ("--enable-dp-attention", "--data-parallel-size-local")
"""Flags under which copies share devices, or lie elsewhere."""
_OWN_SPLITS: Final = frozenset(
    {
        *TENSOR_PARALLEL_FLAGS,
        *("--pp-size", "-pp", "--pipeline-parallel-size"),
        *("-dpl", "--data-parallel-size-local"),
    }
)
"""Flags in `engine.args` that say by themselves how the devices are shared out."""


_MAX_RANKS: Final = 64
"""Most processes that compute a replica, as engine treeline bounds them."""
_TOLD_BY_CUSTOM: Final = [labels.KV_EVENTS_PORT, labels.KV_REPLAY_PORT, labels.KV_EVENTS_TOPIC]
"""Annotations of a custom engine's pods that say where they publish KV events."""


class PoolSpec(Part):
    """The desired pool."""

    RULES = (
        Rule(
            "self.engine.type == 'treeline' || !self.model.uri.startsWith('builtin://')",
            "builtin:// models are in the image of engine treeline: use hf://, s3://, gs://, oci://, pvc:// or path://",
            field=".model.uri",
        ),
        forbidden(
            "self.engine.type in ['sglang', 'vllm'] || !has(self.model.tokenizer)",
            "the engine takes the tokenizer from the folder of the weights: remove model.tokenizer and put it there",
            field=".model.tokenizer",
        ),
        forbidden(
            "self.engine.type in ['sglang', 'vllm'] || !has(self.model.chatTemplateRef)",
            "the engine takes the chat template from the folder of the weights: remove model.chatTemplateRef and put it"
            " there",
            field=".model.chatTemplateRef",
        ),
        forbidden(
            "self.engine.type != 'treeline' || !self.model.pickerReadsClaim",
            "engine treeline serves its tokenizer itself: remove model.pickerReadsClaim",
            field=".model.pickerReadsClaim",
        ),
        forbidden(
            "!has(self.model.cache) || self.model.uri.matches('^(hf|s3|gs)://')"
            " || (has(self.model.tokenizer) && self.model.tokenizer.matches('^(hf|s3|gs)://'))"
            " || (has(self.engine.adapters) && self.engine.adapters.exists(a, a.uri.matches('^(hf|s3|gs)://')))",
            "nothing is downloaded: remove model.cache, or use an hf://, s3:// or gs:// uri",
            field=".model.cache",
        ),
        Rule(
            "!has(self.model.name) || !has(self.engine.adapters)"
            " || self.engine.adapters.all(a, a.name != self.model.name)",
            "an adapter has the name of the model: give it another name",
            field=".engine.adapters",
        ),
        Rule(
            "self.accelerator.type == 'cpu' || self.accelerator.nodes > 1 || !has(self.engine.tensorParallel)"
            " || self.accelerator.count % self.engine.tensorParallel == 0",
            "accelerator.count is not a multiple of tensorParallel: correct one of them",
            field=".accelerator.count",
        ),
        forbidden(
            "self.accelerator.nodes == 1 || self.engine.type == 'treeline'",
            "only engine treeline is started over several pods: set accelerator.nodes to 1, or use engine treeline",
            field=".accelerator.nodes",
        ),
        forbidden(
            "self.accelerator.nodes == 1 || !has(self.engine.lora)",
            "adapters are loaded by one pod, not by several that share the model: remove engine.lora, or set"
            " accelerator.nodes to 1",
            field=".engine.lora",
        ),
        forbidden(
            "self.accelerator.nodes == 1 || self.engine.dataParallel == 1",
            "one copy of the model cannot span pods that hold several: set accelerator.nodes or dataParallel to 1",
            field=".engine.dataParallel",
        ),
        Rule(
            "self.accelerator.nodes == 1 || (has(self.engine.tensorParallel)"
            " ? (self.accelerator.type == 'cpu' ? self.engine.tensorParallel % self.accelerator.nodes == 0"
            " : self.engine.tensorParallel % self.accelerator.count == 0"
            " && self.accelerator.count * self.accelerator.nodes % self.engine.tensorParallel == 0)"
            " : self.accelerator.type != 'cpu')",
            "tensorParallel counts devices of whole pods: set it to accelerator.count times accelerator.nodes, or to"
            " accelerator.count for a stage in each pod; on CPUs to a multiple of accelerator.nodes",
            field=".engine.tensorParallel",
        ),
        forbidden(
            "self.accelerator.nodes == 1 || !has(self.engine.args)"
            " || !self.engine.args.exists(a, a.matches('^--pp-size(=|$)'))",
            "tensorParallel makes the stages of several pods: remove --pp-size from args, and set tensorParallel to"
            " accelerator.count for a stage in each pod",
            field=".engine.args",
        ),
        Rule(
            f"self.accelerator.count * self.accelerator.nodes <= {_MAX_RANKS}",
            f"a replica has at most {_MAX_RANKS} devices: lower accelerator.count or accelerator.nodes",
            field=".accelerator.nodes",
        ),
        Rule(
            f"self.accelerator.nodes == 1 || self.engine.port != {ports.RANKS}",
            f"the pods of a replica meet at port {ports.RANKS}: choose another",
            field=".engine.port",
        ),
        Rule(
            "self.accelerator.type == 'cpu'"
            " || self.accelerator.count * self.accelerator.nodes >="
            " (has(self.engine.tensorParallel) ? self.engine.tensorParallel : 1) * self.engine.dataParallel"
            f" || (has(self.engine.args) && self.engine.args.exists(a, a in {list(_OTHER_SPLITS)}))",
            "every copy of the model needs its devices: set accelerator.count to tensorParallel times dataParallel",
            field=".accelerator.count",
        ),
        forbidden(
            "self.accelerator.type != 'amd' || self.engine.type != 'treeline'",
            "engine treeline computes on CPUs and on NVIDIA's GPUs: use engine sglang, vllm or custom",
            field=".engine.type",
        ),
        Rule(
            "self.accelerator.type != 'amd' || has(self.engine.image)",
            "the operator's own images are for CPUs and NVIDIA's GPUs: set engine.image to one of your engine for ROCm",
            field=".engine.image",
        ),
        *template_rules(f"self.engine.type == 'custom' && k in {_TOLD_BY_CUSTOM}"),
        forbidden(
            "!has(self.endpointPicker) || !has(self.endpointPicker.flowControl)"
            " || !has(self.endpointPicker.flowControl.fairnessHeader) || !has(self.gateway)"
            " || !has(self.gateway.standalone) || !has(self.gateway.standalone.apiKeysSecretRef)",
            "clients are named by API keys: remove fairnessHeader, or gateway.standalone.apiKeysSecretRef",
            field=".endpointPicker.flowControl.fairnessHeader",
        ),
        Rule(
            "self.engine.type != 'sglang' || !has(self.model.name) || !self.model.name.contains(':')",
            "engine sglang reads model:adapter: choose a model.name without ':'",
            field=".model.name",
        ),
        *PREFILL_RULES,
    )

    model: ModelSource
    """The model that the pool serves."""
    preset: DnsLabel | None = None
    """Preset of the chart (`presets`); it sets fields that are at their defaults here."""
    replicas: Annotated[StrictInt, Field(ge=0, le=1000)] = 1
    """Number of replicas, each a pod (or `accelerator.nodes` pods); also set by `kubectl scale` and autoscalers."""
    template: Annotated[dict[str, Any], WithJsonSchema(_TEMPLATE)] | None = None
    """PodTemplate fragment, merged into the pods; the engine's container is `runtime`."""
    accelerator: Accelerator = Field(default_factory=Accelerator)
    """Devices of a pod, and pods of a replica."""
    engine: Engine = Field(default_factory=Engine)
    """The server in the pods."""
    prefill: Prefill | None = None
    """Further pods that compute prompts; the pool's own replicas then answer (docs/disaggregation.md)."""
    endpoint_picker: EndpointPicker = Field(default_factory=EndpointPicker)
    """The picker of the gateway."""
    gateway: Gateway = Field(default_factory=Gateway)
    """Access for clients: through an Envoy of our own, or an existing Gateway."""
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    """Autoscaling, which sets spec.replicas."""
    drain: Drain = Field(default_factory=Drain)
    """Time for pods to finish their requests before they end."""
    rollout: Rollout = Field(default_factory=Rollout)
    """Replacement of pods after a change."""
    disruption_budget: DisruptionBudget = Field(default_factory=DisruptionBudget)
    """Limits of evictions while nodes are drained."""
    tracing: Tracing | None = None
    """OpenTelemetry traces from engines treeline and vllm, the picker and our own Envoy. Picker and Envoy send to the
    collector of the gateway's oldest pool that names one."""

    @property
    def downloads(self) -> bool:
        """Whether anything is downloaded."""
        return self.model.downloads or any(is_downloaded(a.uri) for a in self.engine.adapters)

    @property
    def tensor_parallel(self) -> int:
        """Devices over which each layer is split: as asked, or all that `dataParallel` leaves for a copy."""
        engine, accelerator = self.engine, self.accelerator
        if engine.tensor_parallel is not None:
            return engine.tensor_parallel
        if not accelerator.is_gpu or engine.type == "custom" or self.splits_by_args:
            return 1
        shares = engine.type == "sglang" and "--enable-dp-attention" in engine.args
        devices = accelerator.count * accelerator.nodes
        return devices if shares else max(1, devices // engine.data_parallel)

    @property
    def stages(self) -> int:
        """Parts of the layers that the devices of several pods compute one after another: where `tensorParallel` leaves
        more devices than one part takes."""
        accelerator = self.accelerator
        if accelerator.nodes == 1 or not accelerator.is_gpu or self.splits_by_args:
            return 1
        return accelerator.count * accelerator.nodes // self.tensor_parallel

    @property
    def ranks(self) -> int:
        """Processes of a pod that compute: one for each GPU, or those that share a CPU pod's layers."""
        return max(self.accelerator.count, self.tensor_parallel * self.engine.data_parallel // self.accelerator.nodes)

    @property
    def unused_devices(self) -> int:
        """Devices of a replica that the engine does not use, as far as its settings show."""
        engine, accelerator = self.engine, self.accelerator
        if not accelerator.is_gpu or engine.type == "custom" or self.splits_by_args:
            return 0
        if not set(_OTHER_SPLITS).isdisjoint(engine.args):
            return 0
        return accelerator.count * accelerator.nodes - self.tensor_parallel * self.stages * engine.data_parallel

    @property
    def splits_by_args(self) -> bool:
        """Whether `engine.args` set how devices are split."""
        return any(arg.partition("=")[0] in _OWN_SPLITS for arg in self.engine.args)


@DOCUMENTED
class GatewayStatus(TypedDict, total=False):
    """The gateway that the pool shares."""

    name: str
    """Name of the gateway."""
    epp: str
    """Name of the picker's Deployment."""
    owner: str
    """The pool whose settings apply."""


@DOCUMENTED
class RoutingStatus(TypedDict, total=False):
    """The picker's source of knowledge about cached prefixes."""

    way: Annotated[str, StringConstraints(max_length=64)]
    """`events` of the engines, or `history`: the picker's own requests."""
    reason: Annotated[str, StringConstraints(max_length=64)]
    """Why it is `history`."""


@DOCUMENTED
class PresetStatus(TypedDict):
    """The pool merged with its preset, as far as pickers use it: they do not read presets."""

    name: Annotated[str, StringConstraints(max_length=63)]
    """Name of the preset."""
    engine: Annotated[str, StringConstraints(max_length=32)]
    """Type of the engine."""
    port: int
    """Port of the OpenAI API in the pods."""
    adapters: Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=64)]
    """Names of the adapters."""
    policy: Annotated[str, StringConstraints(max_length=1024)]
    """Policy of the picker, with its parameters."""


@DOCUMENTED
class DownloadStatus(TypedDict, total=False):
    """Progress of the download."""

    percent: int
    """Percentage of bytes."""
    bytesDone: int
    """Downloaded bytes."""
    bytesTotal: int
    """All bytes."""


@DOCUMENTED
class AutoscalingStatus(TypedDict, total=False):
    """The operator's last change of replicas."""

    lastScaleTime: str
    """Time of the change."""
    replicas: int
    """The new number of replicas."""
    message: Annotated[str, StringConstraints(max_length=512)]
    """The demand that caused it."""


@DOCUMENTED
class PrefillStatus(TypedDict, total=False):
    """The pods that compute prompts."""

    replicas: int
    """Number of pods."""
    ready: int
    """Number of ready pods."""
    advisedReplicas: int
    """Number of pods for the prompts of the last time; followed with `prefill.maxReplicas`."""


@DOCUMENTED
class PoolStatus(TypedDict, total=False):
    """The state of the pool."""

    observedGeneration: int
    """Generation of the spec that the status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=BY_TYPE)]
    """Conditions of the pool."""
    replicas: int
    """Number of pods."""
    readyReplicas: int
    """Number of ready pods."""
    replicaSummary: Annotated[str, StringConstraints(max_length=16)]
    """Ready and wanted pods, as `2/3`."""
    prefill: PrefillStatus
    """The pods of `spec.prefill`, which the other figures leave out."""
    selector: str
    """Label selector of the pods, for autoscalers."""
    url: str
    """URL for clients."""
    modelName: str
    """Name of the model in requests."""
    modelCommit: Annotated[str, StringConstraints(max_length=128)]
    """The Hub's commit of the branch or tag in `model.uri` that all pods use."""
    revision: str
    """Revision of the current spec."""
    gateway: GatewayStatus
    """The gateway that the pool shares."""
    download: DownloadStatus
    """Progress of the download."""
    autoscaling: AutoscalingStatus
    """The operator's last change of replicas."""
    preset: PresetStatus
    """The pool merged with its preset."""
    routing: RoutingStatus
    """How the picker knows cached prefixes."""


_MAX_NAME_OF_GROUPS: Final = 37
"""With a revision and the number of a group it makes the name of a StatefulSet, which has 52 characters at most."""
_RESERVED: Final = ("-gateway", "-epp", "-edge", "-kv-keys", "-gie", "-pods")


class InferencePool(Resource):
    """A model served by a set of equal pods behind one URL."""

    RULES = (
        Rule(
            f"self.metadata.name.size() <= {MAX_NAME}",
            f"the name is too long, since names of other objects are made from it: use {MAX_NAME} characters or fewer",
            field=".metadata.name",
        ),
        Rule(
            f"self.metadata.name.matches('{SHORT_NAME_PATTERN}')",
            "names of Services are made from the pool's: use small letters, digits and '-', a letter first",
            field=".metadata.name",
        ),
        Rule(
            f"self.spec.accelerator.nodes == 1 || self.metadata.name.size() <= {_MAX_NAME_OF_GROUPS}",
            "the name is too long for replicas of several pods, since names of StatefulSets are made from it: use"
            f" {_MAX_NAME_OF_GROUPS} characters or fewer",
            field=".metadata.name",
        ),
        Rule(
            f"!self.metadata.name.matches('({'|'.join(_RESERVED)})$')",
            f"the endings {', '.join(_RESERVED)} are reserved for the operator's objects: choose another name",
            field=".metadata.name",
        ),
    )

    kind: Literal["InferencePool"] = "InferencePool"
    metadata: ObjectMeta
    spec: PoolSpec
    """The desired pool."""
    status: PoolStatus = Field(default_factory=PoolStatus)
    """The state of the pool, written by the operator."""

    @property
    def advised_prefill(self) -> int:
        """Pods that should compute prompts, as advised last; 0 without advice."""
        return self.status.get("prefill", {}).get("advisedReplicas", 0)

    @property
    def prefill_replicas(self) -> int:
        """Wanted pods that only compute prompts: none where nothing answers."""
        own = self.spec.prefill
        if own is None or not self.spec.replicas:
            return 0
        if own.max_replicas is None:
            return own.replicas
        return min(max(self.advised_prefill or own.replicas, own.min_replicas or 1), own.max_replicas)
