"""Owns what runs in a pod: the accelerator, the engine, and which setting means something to which engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, StrictFloat, StrictInt, StringConstraints
from pydantic.alias_generators import to_camel
from treeline_wire import ports

from treeline_operator.api.parts import (
    LABEL_VALUE_PATTERN,
    LIST_MAP,
    SET,
    DnsName,
    KeyRef,
    NamedRef,
    Part,
    Resources,
    ServedName,
)
from treeline_operator.api.rules import Rule, forbidden
from treeline_operator.api.source import Cache, Uri

Text = Annotated[str, StringConstraints(max_length=1024)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
PolicyName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=32)]
EngineType = Literal["treeline", "sglang", "vllm", "custom"]
RESOURCE_NAME: Final = "nvidia.com/gpu"

FLAGS: Final[Mapping[str, Mapping[EngineType, str]]] = {
    "dtype": {"treeline": "--dtype", "sglang": "--dtype", "vllm": "--dtype"},
    "quantization": {"treeline": "--quantization", "sglang": "--quantization", "vllm": "--quantization"},
    "kv_cache_dtype": {"treeline": "--kv-cache-dtype", "sglang": "--kv-cache-dtype", "vllm": "--kv-cache-dtype"},
    "threads": {"treeline": "--threads"},
    "host_cache": {"treeline": "--host-cache"},
    "context_length": {"treeline": "--context-length", "sglang": "--context-length", "vllm": "--max-model-len"},
    "page_size": {"treeline": "--page-size", "sglang": "--page-size", "vllm": "--block-size"},
    "max_total_tokens": {"treeline": "--max-total-tokens", "sglang": "--max-total-tokens"},
    "memory_fraction": {
        "treeline": "--mem-fraction",
        "sglang": "--mem-fraction-static",
        "vllm": "--gpu-memory-utilization",
    },
    "max_running_requests": {
        "treeline": "--max-running-requests",
        "sglang": "--max-running-requests",
        "vllm": "--max-num-seqs",
    },
    "max_queued_requests": {"treeline": "--max-queued-requests", "sglang": "--max-queued-requests"},
    "chunked_prefill_size": {
        "treeline": "--chunked-prefill-size",
        "sglang": "--chunked-prefill-size",
        "vllm": "--max-num-batched-tokens",
    },
    "schedule_policy": {"treeline": "--schedule-policy", "sglang": "--schedule-policy", "vllm": "--scheduling-policy"},
    "eviction_policy": {"treeline": "--eviction-policy", "sglang": "--radix-eviction-policy"},
    "tensor_parallel": {"treeline": "--tp-size", "sglang": "--tp-size", "vllm": "--tensor-parallel-size"},
    "data_parallel": {"treeline": "--dp-size", "sglang": "--dp-size", "vllm": "--data-parallel-size"},
}
"""Setting → the engines that have it, each with its flag."""

SETTINGS: Final[Mapping[str, tuple[EngineType, ...]]] = {
    to_camel(setting): tuple(flags)
    for setting, flags in FLAGS.items()
    if setting not in ("tensor_parallel", "data_parallel")
}
"""Setting → the engines that have it; refused for others, which would ignore it. (Settings of parallelism have their
own rules.)"""

WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("auto", "fp8"),
    "kvCacheDtype": ("auto", "fp8_e4m3"),
    "evictionPolicy": ("lru", "lfu", "priority"),
    "schedulePolicy": ("fcfs", "lpm", "priority"),
}
"""Setting → values of engine treeline. Other engines' values change with their releases and plugins, and they check
them themselves."""


OWN_FLAGS: Final[Mapping[EngineType, Mapping[str, str]]] = {
    "treeline": {
        "--model": "model.uri",
        "--served-model-name": "model.name",
        "--port": "engine.port",
        "--drain-timeout": "drain.timeoutSeconds",
        "--device": "accelerator.type",
        "--tp-size": "tensorParallel",
        "--dp-size": "dataParallel",
        "--nnodes": "accelerator.nodes",
        "--host-cache": "hostCache",
        **dict.fromkeys(("--host", "--metrics-host", "--metrics-port", "--curve-dir", "--pre-stop"), ""),
        **dict.fromkeys(("--node-rank", "--dist-init-addr", "--kv-transfer-port"), ""),
    },
    "sglang": {
        "--model-path": "model.uri",
        "--model": "model.uri",
        "--served-model-name": "model.name",
        "--port": "engine.port",
        **dict.fromkeys(("--host", "--kv-events-config", "--load-publish-endpoint", "--admin-api-key"), ""),
    },
    "vllm": {
        "--model": "model.uri",
        "--served-model-name": "model.name",
        "--port": "engine.port",
        "--shutdown-timeout": "drain.timeoutSeconds",
        **dict.fromkeys(("--host", "--uds", "--kv-events-config"), ""),
    },
}
"""Flags that the operator sets and that `args` must not override, each with its field: otherwise pods would listen
elsewhere, or differ from the field."""
LORA_FLAGS: Final = ("--lora-root", "--max-loras", "--max-lora-rank", "--admin-host", "--admin-port")
MEDIA_FLAGS: Final = (
    *("--max-images", "--max-image-pixels", "--max-audio-seconds", "--max-video-seconds", "--allowed-media-domains"),
)
ADAPTER_FLAGS: Final = ("--lora-paths", "--lora-modules")
TENSOR_PARALLEL_FLAGS: Final = ("--tp", "--tp-size", "-tp", "--tensor-parallel-size")


KV_PORTS: Final = frozenset({ports.EVENTS, ports.REPLAY, ports.LOAD})


def _listed(words: tuple[str, ...], conjunction: str = "and") -> str:
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def _setting_rule(setting: str, engines: tuple[EngineType, ...]) -> Rule:
    return forbidden(
        f"!has(self.{setting}) || self.type in {list(engines)}",
        f"{setting} is a setting of {_listed(engines)}: remove it, or pass the engine's own flag in args",
        field=f".{setting}",
    )


def _word_rule(setting: str, words: tuple[str, ...]) -> Rule:
    return Rule(
        f"self.type != 'treeline' || !has(self.{setting}) || self.{setting} in {list(words)}",
        f"engine treeline takes {_listed(words, 'or')} as {setting}: choose one of them, or remove it",
        field=f".{setting}",
    )


def args_say(flags: Iterable[str], engine: str = "self") -> str:
    """CEL: whether `args` has one of these flags, or a field of one. vLLM takes `_` for `-` in them."""
    names = "|".join(flag[:2] + flag[2:].replace("-", "[-_]") for flag in flags)
    return f"has({engine}.args) && {engine}.args.exists(a, a.matches('^({names})([.=]|$)'))"


def _own_flags_rule(engine: EngineType, flags: Mapping[str, str]) -> Rule:
    listed = ", ".join(f"{flag} ({field})" if field else flag for flag, field in flags.items())
    return forbidden(
        f"self.type != '{engine}' || !({args_say(flags)})",
        f"the operator sets these flags of engine {engine}: {listed}: remove them from args, and use the fields",
        field=".args",
    )


_GPU_ONLY: Final = "is for GPUs only: remove it, or set type to nvidia or amd"


class Accelerator(Part):
    """Devices of a pod, and pods of a replica."""

    RULES = (
        forbidden(
            "self.type != 'cpu' || self.count == 1",
            f"count {_GPU_ONLY}; request CPUs with engine.resources",
            field=".count",
        ),
        forbidden(
            "self.type != 'cpu' || !has(self.class)",
            f"class {_GPU_ONLY}; choose nodes by template.spec.nodeSelector",
            field=".class",
        ),
        forbidden(
            f"self.type != 'cpu' || self.resourceName == '{RESOURCE_NAME}'",
            f"resourceName {_GPU_ONLY}",
            field=".resourceName",
        ),
    )

    type: Literal["cpu", "nvidia", "amd"] = "cpu"
    """Kind of device."""
    count: Annotated[StrictInt, Field(ge=1, le=16)] = 1
    """Devices per pod. For GPUs."""
    nodes: Annotated[StrictInt, Field(ge=1, le=16)] = 1
    """Pods per replica, over which the model is split: for models that need more devices than a node has. More than one
    needs LeaderWorkerSet in the cluster, and engine treeline."""
    class_: Annotated[str, StringConstraints(pattern=LABEL_VALUE_PATTERN, min_length=1, max_length=63)] | None = Field(
        default=None, alias="class"
    )
    """Device model: the value of the node label `nvidia.com/gpu.product` or `amd.com/gpu.product-name`."""
    resource_name: Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")] = (
        RESOURCE_NAME
    )
    """Extended resource of the device; for amd the default means `amd.com/gpu`. Not requested if `template` has
    `resources.claims`. Pods tolerate taints of this name."""

    @property
    def is_gpu(self) -> bool:
        return self.type != "cpu"

    @property
    def resource(self) -> str:
        """The extended resource of the device."""
        return "amd.com/gpu" if self.type == "amd" and self.resource_name == RESOURCE_NAME else self.resource_name

    @property
    def product_label(self) -> str:
        """The node label that names the device, as its vendor's labeller sets it."""
        return "amd.com/gpu.product-name" if self.type == "amd" else "nvidia.com/gpu.product"


class Adapter(Part):
    """A LoRA adapter."""

    name: ServedName
    """Name of the adapter in requests."""
    uri: Uri
    """Where its weights are, as in `model.uri`."""


class LiveAdapters(Part):
    """Room for the adapters of InferenceModels, which pods load and unload while they run."""

    slots: Annotated[StrictInt, Field(ge=1, le=256)] = 8
    """Most adapters on the device at once; further ones wait in host memory."""
    max_rank: Annotated[StrictInt, Field(ge=1, le=1024)] = 64
    """The highest rank. Each slot has room for it."""
    claims: Annotated[tuple[DnsName, ...], Field(max_length=8, json_schema_extra=SET)] = ()
    """PersistentVolumeClaims of pvc:// adapters, which all pods mount read-only."""
    token_secret_ref: KeyRef | None = None
    """Secret with the Hugging Face token, for gated adapters. The engine does not see it."""
    credentials_secret_ref: NamedRef | None = None
    """Secret whose keys are environment variables of the download, as in `model.credentialsSecretRef`."""


Domain = Annotated[
    str, StringConstraints(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?$", max_length=253)
]


class Media(Part):
    """Limits of images, videos and recordings in requests, for models that read them; the runtime has the defaults."""

    items: Annotated[StrictInt, Field(ge=0, le=256)] | None = None
    """Most images, videos and recordings of a request."""
    image_pixels: Annotated[StrictInt, Field(ge=1)] | None = None
    """Most pixels of an image, or of a video's frame."""
    audio_seconds: Annotated[StrictInt, Field(ge=1)] | None = None
    """The longest recording."""
    video_seconds: Annotated[StrictInt, Field(ge=1)] | None = None
    """The longest video."""
    allowed_domains: Annotated[tuple[Domain, ...], Field(max_length=64, json_schema_extra=SET)] = ()
    """Where images may be fetched from by https, as `images.example.org` or `*.example.org`; default: nowhere. Opens
    port 443 of the pods' egress."""


class Engine(Part):
    """The server in the pods and its settings. A setting that the engine lacks is refused."""

    RULES = (
        *(_setting_rule(setting, engines) for setting, engines in SETTINGS.items()),
        *(_word_rule(setting, words) for setting, words in WORDS.items()),
        *(_own_flags_rule(engine, flags) for engine, flags in OWN_FLAGS.items()),
        forbidden(
            f"!has(self.tensorParallel) || !({args_say(TENSOR_PARALLEL_FLAGS)})",
            "args and tensorParallel both set the number of devices: remove one of them",
            field=".args",
        ),
        forbidden(
            f"!has(self.adapters) || self.adapters.size() == 0 || !({args_say(ADAPTER_FLAGS)})",
            "adapters are named in args and in the field adapters: name all of them in the field",
            field=".args",
        ),
        Rule(
            "self.type != 'custom' || has(self.image)",
            "engine custom has no image of its own: set engine.image",
            field=".image",
            reason="FieldValueRequired",
        ),
        forbidden(
            "self.type != 'treeline' || !has(self.adapters) || self.adapters.size() == 0",
            "engine treeline loads adapters of InferenceModels: remove adapters, and set lora and their spec.adapter",
            field=".adapters",
        ),
        forbidden(
            "self.type == 'treeline' || !has(self.lora)",
            "only engine treeline loads adapters while it runs: remove lora, or name the adapters in adapters",
            field=".lora",
        ),
        forbidden(
            "self.type == 'treeline' || !has(self.media)",
            "only engine treeline has these limits: remove media, and use args",
            field=".media",
        ),
        forbidden(
            f"!has(self.media) || !({args_say(MEDIA_FLAGS)})",
            f"media sets {', '.join(MEDIA_FLAGS)}: remove them from args",
            field=".args",
        ),
        forbidden(
            f"!has(self.lora) || !({args_say(LORA_FLAGS)})",
            f"lora sets {', '.join(LORA_FLAGS)}, and needs the administration where it is: remove them from args",
            field=".args",
        ),
        forbidden(
            "self.type != 'custom' || ((!has(self.tensorParallel) || self.tensorParallel == 1)"
            " && self.dataParallel == 1)",
            "flags of a custom engine are unknown: remove tensorParallel and dataParallel and use args",
        ),
        Rule(
            f"!has(self.hostCache) || self.port < {ports.KV_TRANSFER}"
            f" || self.port >= {ports.KV_TRANSFER} + self.dataParallel",
            f"ports {ports.KV_TRANSFER} and the following ones, as many as dataParallel, are for pages of hostCache:"
            " choose another",
            field=".port",
        ),
        forbidden(
            "self.type != 'custom' || !has(self.adapters) || self.adapters.size() == 0",
            "flags of a custom engine are unknown: remove adapters and use args",
            field=".adapters",
        ),
        Rule(
            f"self.type == 'custom' || {sorted(KV_PORTS)}.all(p, self.port < p || self.port >= p + self.dataParallel)",
            f"ports {', '.join(map(str, sorted(KV_PORTS)))} and the following ones, as many as dataParallel, are for"
            " KV events and load reports: choose another",
            field=".port",
        ),
    )

    type: EngineType = "treeline"
    """The server that runs the model."""
    image: Image | None = None
    """Image of the runtime container. Required for `custom`."""
    command: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Replaces the image's entry point."""
    args: Annotated[tuple[Text, ...], Field(max_length=128)] = ()
    """Further arguments, after those made from the settings."""
    port: Annotated[StrictInt, Field(ge=1024, le=65535)] = 8000
    """Port of the OpenAI API in the pod. A change interrupts service: pods with the old port get no
    requests any more."""
    context_length: Annotated[StrictInt, Field(ge=1)] | None = None
    """Most tokens of prompt and answer together."""
    memory_fraction: Annotated[StrictFloat, Field(ge=0.05, le=0.99)] | None = None
    """Share of the device's memory for weights and KV cache."""
    page_size: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Tokens per page of the KV cache."""
    tensor_parallel: Annotated[StrictInt, Field(ge=1, le=64)] | None = None
    """Devices (on CPUs: processes) that share each layer, in all pods of a replica; default accelerator.count × nodes ÷
    dataParallel. accelerator.count with several nodes: each pod has a part of the layers."""
    data_parallel: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Copies of the model in one pod."""
    max_running_requests: Annotated[StrictInt, Field(ge=1)] | None = None
    """Most running requests."""
    max_queued_requests: Annotated[StrictInt, Field(ge=0)] | None = None
    """Most waiting requests."""
    chunked_prefill_size: Annotated[StrictInt, Field(ge=1)] | None = None
    """Most tokens of prompt in one step."""
    host_cache: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}[MGT]i$")] | None = None
    """Host memory, such as 16Gi, for cached pages that have left the device (docs/pages.md); the default memory request
    includes it. The pods of the pool give each other such pages. Needed with prefill."""
    max_total_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    """Size of the KV cache in tokens."""
    dtype: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=32)] | None = None
    """Number format of weights and activations."""
    quantization: PolicyName | None = None
    """Quantisation at load, such as `fp8`; default as in the checkpoint."""
    kv_cache_dtype: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=32)] | None = None
    """Number format of the KV cache; `fp8_e4m3` holds twice the tokens of bfloat16."""
    threads: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """CPU threads."""
    eviction_policy: PolicyName | None = None
    """Eviction order of the prefix cache."""
    schedule_policy: PolicyName | None = None
    """Order of waiting requests."""
    adapters: Annotated[tuple[Adapter, ...], Field(max_length=64, json_schema_extra=LIST_MAP)] = ()
    """LoRA adapters of sglang and vllm, which pods load as they start."""
    lora: LiveAdapters | None = None
    """Lets pods load adapters of InferenceModels (`spec.adapter`) while they run; for treeline."""
    media: Media | None = None
    """Limits of images and recordings in requests; for treeline. Pods get a `/dev/shm` for them."""
    resources: Resources | None = None
    """Resources of the runtime. Default requests on GPUs: 2 CPUs and 4Gi per device, and half of model.size (4Gi more
    per device if unknown); everywhere hostCache. `/dev/shm` counts as memory of the container."""
    cache: Cache | None = None
    """Volume for compiled kernels and graphs; default an emptyDir. Anybody who can write to it can run code in the
    pods."""
