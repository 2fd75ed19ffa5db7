"""The start of each engine: image, command line, probes and ports.

A new engine is an entry of `ENGINES`, a name in `api.engine.EngineType`, and a column in `api.engine.FLAGS`. Flags,
health pages and key levels are those of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic.alias_generators import to_camel
from treeline_wire import labels
from treeline_wire import ports as wire

from treeline_operator.api.engine import FLAGS, MEDIA_FLAGS, EngineType, Media
from treeline_operator.api.engine import Engine as EngineSpec
from treeline_operator.api.parts import Resources
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.prefill import BOOTSTRAP_PORT, NIXL_PORT
from treeline_operator.plan import live_adapters
from treeline_operator.plan.download import Files
from treeline_operator.plan.objects import TEMPLATE_FILE, Object, http_get, probe
from treeline_operator.plan.provision import gib
from treeline_operator.quantity import quantity
from treeline_operator.world import Images

VLLM_IMAGE: Final = "vllm/vllm-openai:v0.33.0"
SGLANG_IMAGE: Final = "lmsysorg/sglang:v0.5.23"
SGLANG_PAGE_SIZE: Final = 16
"""SGLang's own default may be one token a page, which means an event for every token."""
_SGLANG_ADMIN_KEY: Final = "SGLANG_ADMIN_API_KEY"
_SGLANG_HEALTH_TIMEOUT_S: Final = 20
"""Seconds that SGLang's health check waits for a token (SGLANG_HEALTH_CHECK_TIMEOUT)."""
KEYS_DIR: Final = "/var/run/treeline/keys"
"""The path of the KV sockets' keys in our runtime."""
BUILTIN_START_S: Final = 120
DEFAULT_START_S: Final = 1800
"""Time for loading and, on GPUs, for compiling kernels and capturing graphs, which takes minutes for any model size."""
START_S_PER_GIB: Final = 20
"""A network disk at 50 MiB/s; the download has its own container and does not count."""
TEMPLATE_DIR: Final = "/etc/treeline/chat-template"
HUNG_GRACE_S: Final = 15
"""A hanging process is killed soon: it has no streams to finish, and users wait for its restart."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The engine-specific part of a container. `drains` says whether the engine finishes its requests when it is
    stopped."""

    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    ports: tuple[tuple[str, int], ...]
    probes: dict[str, dict[str, Any]]
    drains: bool = True
    caches: tuple[tuple[str, str], ...] = ()
    """Environment → folder in the cache volume, in addition to every engine's."""
    keys: bool = False
    """Whether the engine reads the key pair of its KV sockets."""
    admin_key: str = ""
    """Environment variable with the key to its administration; empty if it takes none."""
    pod_ip: str = ""
    """Environment variable with the pod's address; empty if it needs none."""
    annotations: tuple[tuple[str, str], ...] = ()
    """Facts about the pod that the picker needs and cannot get from the engine."""
    shared_memory: bool = True
    fixed_user: bool = True
    """Whether the image runs as any user."""
    downloads: bool = False
    """Whether the image can download models."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One type of engine. `launch` describes how it is started, with default images.

    `hits_by_flag`: a flag decides whether answers report cached tokens; otherwise the edge asks for it per request, or
    they are not reported. `serves_tokenizer`: the picker gets its tokenizer from the engine. `publishes`: it publishes
    KV events. `metrics`: it serves metrics on a separate port; others serve them on their API port. `unseen` are flags
    in `engine.args` that the picker cannot see, each with the field to use instead. `apart` is its start for one part
    of a request, `prefill` or `decode`; None if it cannot hand prompts over.
    """

    launch: Callable[[InferencePool, Files, Images], Launch]
    hits_by_flag: bool = False
    serves_tokenizer: bool = False
    publishes: bool = True
    metrics: bool = False
    unseen: Mapping[str, str] = field(default_factory=dict)
    apart: Callable[[Launch, str], Launch] | None = None


def engine_of(pool: InferencePool) -> Engine:
    """The engine type of a pool."""
    return ENGINES[pool.spec.engine.type]


def metrics_port(pool: InferencePool) -> int | None:
    """The port that serves metrics and nothing else; None for engines that serve them on their API's."""
    return _beside(pool, wire.RUNTIME_METRICS) if engine_of(pool).metrics else None


def admin_port(pool: InferencePool) -> int:
    """The port of our runtime's administration, on the pod's loopback."""
    return _beside(pool, wire.RUNTIME_ADMIN)


def hides_hits(pool: InferencePool) -> bool:
    """Whether the command line keeps the pods from reporting cached tokens."""
    return engine_of(pool).hits_by_flag and not tells_hits(pool)


def start_seconds(pool: InferencePool) -> int:
    """Seconds that a start may take once the weights are on disk. A known size can only lengthen it."""
    model = pool.spec.model
    least = BUILTIN_START_S if model.source.scheme == "builtin" else DEFAULT_START_S
    return max(least, math.ceil(gib(model.size) * START_S_PER_GIB))


def tells_hits(pool: InferencePool) -> bool:
    """Whether answers may report cached tokens: not to strangers who share a cache."""
    gateway = pool.spec.gateway
    strangers = gateway.has_clients and not gateway.kept_apart and not gateway.edge.expose_routing
    return not strangers


def overridden(pool: InferencePool) -> str:
    """A sentence about settings that `engine.args` repeat, where the arguments win; empty without any."""
    engine = pool.spec.engine
    given = {arg.partition("=")[0].replace("_", "-") for arg in engine.args}
    found = [
        f"{flag} (engine.{to_camel(setting)})"
        for setting, flag in _flags(engine.type)
        if flag in given and getattr(engine, setting) != EngineSpec.model_fields[setting].default
    ]
    return f"engine.args set {', '.join(found)}: the fields have no effect" if found else ""


def unseen_args(flags: Mapping[str, str], args: Iterable[str]) -> str:
    """A sentence about arguments that the picker cannot see, and the fields to use instead; empty without any."""
    given = {arg.partition("=")[0] for arg in args}
    found = [f"{flag} ({instead})" for flag, instead in flags.items() if flag in given]
    return f"the picker cannot see these flags in engine.args: {', '.join(found)}" if found else ""


# ---- the engines ----------------------------------------------------------------------------------------------------


def _treeline(pool: InferencePool, files: Files, images: Images) -> Launch:
    spec, metrics = pool.spec, _beside(pool, wire.RUNTIME_METRICS)
    gpu = spec.accelerator.is_gpu
    args = [f"--model={files.model}", f"--served-model-name={spec.model.served_name}"]
    args += ["--host", "0.0.0.0", "--port", str(spec.engine.port), "--device", "cuda" if gpu else "cpu"]
    # Administration stays on loopback: it requires exec or port-forward rights on the pod.
    args += ["--metrics-host", "0.0.0.0", "--metrics-port", str(metrics)]
    args += ["--admin-host", "127.0.0.1", "--admin-port", str(admin_port(pool))]
    args += [*live_adapters.flags(pool), *_settings(pool), *_media(spec.engine.media)]
    threads = None if gpu or spec.engine.threads else _cpus_of_a_rank(pool)
    if threads is not None:
        args += ["--threads", str(threads)]
    args += ["--curve-dir", KEYS_DIR, "--start-timeout", str(start_seconds(pool))]
    # During the kubelet's preStop sleep the picker learns that the pod is leaving.
    args += ["--pre-stop", "0", "--drain-timeout", str(spec.drain.timeout_seconds)]
    args += ["--tracing"] if spec.tracing else []
    gives = [("kv-transfer", wire.KV_TRANSFER)] if spec.engine.host_cache else []
    args += ["--kv-transfer-port", str(wire.KV_TRANSFER)] if gives else []
    return Launch(
        image=spec.engine.image or (images.runtime_cuda if gpu else images.runtime),
        command=spec.engine.command or ("python", "-m", "treeline_runtime"),
        args=(*args, *spec.engine.args),
        env=(("HF_HUB_OFFLINE", "1"), *_traces(pool)),
        ports=(*_kv_ports(pool, ("load", wire.LOAD), *gives), ("metrics", metrics)),
        probes=_probes(pool, _http("/ready"), _http("/live"), period=2),
        keys=True,
        annotations=live_adapters.no_wishes(pool),
        shared_memory=spec.ranks * spec.accelerator.nodes > 1 or spec.engine.media is not None,
        downloads=True,
    )


def _media(own: Media | None) -> Iterator[str]:
    if own is None:
        return
    limits = zip(MEDIA_FLAGS, (own.items, own.image_pixels, own.audio_seconds, own.video_seconds), strict=False)
    yield from (f"{flag}={limit}" for flag, limit in limits if limit is not None)
    if own.allowed_domains:
        yield from (MEDIA_FLAGS[-1], *own.allowed_domains)


def _sglang(pool: InferencePool, files: Files, images: Images) -> Launch:
    spec = pool.spec
    args = [f"--model-path={files.model}", f"--served-model-name={spec.model.served_name}"]
    args += ["--host", "0.0.0.0", "--port", str(spec.engine.port)]
    args += [f"--tokenizer-path={files.tokenizer}"] if files.tokenizer else []
    args += _chat_template(pool)
    args += [] if spec.accelerator.is_gpu else ["--device", "cpu"]
    args += _settings(pool)
    if spec.engine.page_size is None:
        args += ["--page-size", str(SGLANG_PAGE_SIZE)]
    if files.adapters:
        args += ["--lora-paths", *(f"{name}={path}" for name, path in files.adapters.items())]
    args += ["--enable-metrics", *(["--enable-cache-report"] if tells_hits(pool) else [])]
    args += ["--kv-events-config", _compact(_kv_events())]
    args += ["--load-publish-endpoint", f"tcp://*:{wire.LOAD}"]
    # The kubelet replaces it as it starts the container: neither the Deployment nor the Pod has the key itself.
    args += ["--admin-api-key", f"$({_SGLANG_ADMIN_KEY})"]
    return Launch(
        image=spec.engine.image or SGLANG_IMAGE,
        command=spec.engine.command or ("python3", "-m", "sglang.launch_server"),
        args=(*args, *spec.engine.args),
        # /health says then whether it has started and does not end, at once; /health_generate is a token that comes
        # back from the devices, or any other that did: asked often it would be load, asked never a hung scheduler
        # would go on as healthy.
        env=(("HF_HUB_OFFLINE", "1"), ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")),
        ports=tuple(_kv_ports(pool, ("load", wire.LOAD))),
        probes=_probes(
            pool,
            _http("/health"),
            _http("/health_generate"),
            period=5,
            live_period=30,
            live_timeout=_SGLANG_HEALTH_TIMEOUT_S,
        ),
        caches=(("SGLANG_CACHE_DIR", "sglang"), ("SGLANG_DG_CACHE_DIR", "deep-gemm")),
        admin_key=_SGLANG_ADMIN_KEY,
        annotations=_kv_annotations(pool),
    )


def _vllm(pool: InferencePool, files: Files, images: Images) -> Launch:
    spec = pool.spec
    args = [files.model, f"--served-model-name={spec.model.served_name}"]
    args += ["--host", "0.0.0.0", "--port", str(spec.engine.port)]
    args += [f"--tokenizer={files.tokenizer}"] if files.tokenizer else []
    args += _chat_template(pool)
    args += _settings(pool)
    if files.adapters:
        args += ["--enable-lora", "--lora-modules"]
        args += [f"{name}={path}" for name, path in files.adapters.items()]
    args += ["--enable-prompt-tokens-details"] if tells_hits(pool) else []
    args += ["--kv-events-config", _compact({"enable_kv_cache_events": True, **_kv_events()})]
    args += ["--shutdown-timeout", str(spec.drain.timeout_seconds)]
    args += ["--otlp-traces-endpoint", spec.tracing.endpoint] if spec.tracing else []
    return Launch(
        image=spec.engine.image or VLLM_IMAGE,
        command=spec.engine.command or ("vllm", "serve"),
        args=(*args, *spec.engine.args),
        # Block hashes start from this seed: the same in every pod, so that equal prefixes have equal hashes.
        env=(
            ("HF_HUB_OFFLINE", "1"),
            ("PYTHONHASHSEED", "0"),
            ("VLLM_NO_USAGE_STATS", "1"),
            *_traces(pool, ("OTEL_SERVICE_NAME", "vllm")),
        ),
        ports=tuple(_kv_ports(pool)),
        # Its health page checks that the engine's process lives, at no cost, and answers 503 otherwise.
        probes=_probes(pool, _http("/health"), _http("/health"), period=5),
        caches=(("VLLM_CACHE_ROOT", "vllm"),),
        annotations=_kv_annotations(pool),
    )


def _sglang_apart(start: Launch, role: str) -> Launch:
    flags = ("--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT))
    return replace(start, args=(*flags, *start.args))


def _vllm_apart(start: Launch, role: str) -> Launch:
    """Both sides start alike: each request says what is asked of them. A prompt that cannot be fetched is computed
    anew."""
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    model, *args = start.args
    return replace(
        start,
        args=(model, "--kv-transfer-config", _compact(config), *args),
        env=(*start.env, ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(NIXL_PORT))),
        pod_ip="VLLM_NIXL_SIDE_CHANNEL_HOST",
        annotations=(*start.annotations, (labels.KV_TRANSFER, "nixl")),
    )


def _custom(pool: InferencePool, files: Files, images: Images) -> Launch:
    spec = pool.spec
    tcp = {"tcpSocket": {"port": "http"}}
    return Launch(
        image=spec.engine.image or "",
        command=spec.engine.command,
        args=spec.engine.args,
        env=(
            ("TREELINE_MODEL", files.model),
            ("TREELINE_MODEL_NAME", spec.model.served_name),
            ("TREELINE_PORT", str(spec.engine.port)),
        ),
        ports=(("http", spec.engine.port),),
        probes=_probes(pool, tcp, tcp, period=5),
        drains=False,
        shared_memory=spec.accelerator.is_gpu,
        fixed_user=False,
    )


_API_KEY: Final = "the picker has none; the gateway takes gateway.standalone.apiKeysSecretRef"
_TEMPLATE: Final = "model.chatTemplateRef sets both"
_TOKENIZER: Final = "model.tokenizer sets both"

ENGINES: Final[Mapping[EngineType, Engine]] = {
    "treeline": Engine(_treeline, serves_tokenizer=True, metrics=True, apart=lambda start, _role: start),
    "sglang": Engine(
        _sglang,
        hits_by_flag=True,
        unseen={"--chat-template": _TEMPLATE, "--tokenizer-path": _TOKENIZER, "--api-key": _API_KEY},
        apart=_sglang_apart,
    ),
    "vllm": Engine(
        _vllm,
        hits_by_flag=True,
        unseen={"--chat-template": _TEMPLATE, "--tokenizer": _TOKENIZER, "--api-key": _API_KEY},
        apart=_vllm_apart,
    ),
    # Any other server with an OpenAI-compatible API, started as its user says. Its flags are not known; its environment
    # gives it the model's place and name.
    "custom": Engine(_custom, publishes=False),
}


# ---- shared parts ---------------------------------------------------------------------------------------------------


def _flags(engine: EngineType) -> Iterator[tuple[str, str]]:
    """Settings and their flags of an engine."""
    return ((setting, flags[engine]) for setting, flags in FLAGS.items() if engine in flags)


def _settings(pool: InferencePool) -> list[str]:
    """The flags of all settings that differ from the engine's own defaults."""
    engine = pool.spec.engine
    args = []
    for setting, flag in _flags(engine.type):
        value = pool.spec.tensor_parallel if setting == "tensor_parallel" else getattr(engine, setting)
        parallel = setting in ("tensor_parallel", "data_parallel")
        if value is not None and not (parallel and value == 1):
            args.append(f"{flag}={value:g}" if isinstance(value, float) else f"{flag}={value}")
    return args if pool.spec.stages == 1 else [*args, f"--pp-size={pool.spec.stages}"]


def _traces(pool: InferencePool, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The environment of an engine that reads OpenTelemetry's variables; empty without tracing."""
    return () if pool.spec.tracing is None else (*pool.spec.tracing.environment, *more)


def _chat_template(pool: InferencePool) -> list[str]:
    """The flag of SGLang and vLLM for a template that is not the model's own."""
    return ["--chat-template", f"{TEMPLATE_DIR}/{TEMPLATE_FILE}"] if pool.spec.model.chat_template_ref else []


def _kv_events() -> dict[str, object]:
    """`--kv-events-config` of SGLang and vLLM. Their ranks count up from these ports, and publish under no topic: a
    socket belongs to one engine."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{wire.EVENTS}",
        "replay_endpoint": f"tcp://*:{wire.REPLAY}",
        "topic": "",
    }


def _kv_annotations(pool: InferencePool) -> tuple[tuple[str, str], ...]:
    """The same for a picker, for what the engine does not report."""
    return (
        (labels.KV_EVENTS_PORT, str(wire.EVENTS)),
        (labels.KV_REPLAY_PORT, str(wire.REPLAY)),
        (labels.DATA_PARALLEL_SIZE, str(pool.spec.engine.data_parallel)),
    )


def _kv_ports(pool: InferencePool, *more: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """Name and number of the API's port, and of the ports of events and replay (and `more`) for every data-parallel
    rank: `kv-events`, then `kv-events-1` and so on."""
    yield "http", pool.spec.engine.port
    for name, first in (("kv-events", wire.EVENTS), ("kv-replay", wire.REPLAY), *more):
        for rank in range(pool.spec.engine.data_parallel):
            yield f"{name}-{rank}" if rank else name, first + rank


def _http(path: str) -> Object:
    """A probe's question on the API's port."""
    return http_get(path, "http")


def _probes(
    pool: InferencePool, ready: Object, live: Object, *, period: int, live_period: int = 10, live_timeout: int = 10
) -> dict[str, Object]:
    """The three probes of an engine's container: `period` is that of the first two."""
    tries = math.ceil(start_seconds(pool) / period)
    hung = {"terminationGracePeriodSeconds": HUNG_GRACE_S}
    return {
        "startupProbe": probe(ready, period, tries, timeout_s=5) | hung,
        "readinessProbe": probe(ready, period, 2, timeout_s=5),
        "livenessProbe": probe(live, live_period, 6, timeout_s=live_timeout) | hung,
    }


def _compact(value: object) -> str:
    """JSON as one word of a command line."""
    return json.dumps(value, separators=(",", ":"))


def _beside(pool: InferencePool, port: int) -> int:
    """One of our ports, or the next one if the pool has its API there."""
    return port + (pool.spec.engine.port == port)


def _cpus_of_a_rank(pool: InferencePool) -> int | None:
    """Whole cores for each process of a pod with a CPU limit: more threads than that only wait for each other."""
    asked = pool.spec.engine.resources or Resources()
    cores = quantity(asked.limits.get("cpu"))
    return max(1, int(cores) // pool.spec.ranks) if cores is not None else None
