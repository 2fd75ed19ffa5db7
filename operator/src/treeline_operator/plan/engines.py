"""How each engine is started: its command line from the pool's settings, its environment, ports and probes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from treeline_wire import ports as wire

from treeline_operator.api.engine import EngineType
from treeline_operator.api.parts import Resources
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files
from treeline_operator.plan.objects import http_get, probe
from treeline_operator.plan.provision import gib
from treeline_operator.quantity import quantity
from treeline_operator.world import Images

KEYS_DIR: Final = "/var/run/treeline/keys"
DEFAULT_IMAGES: Final[Mapping[str, str]] = {
    "sglang": "lmsysorg/sglang:v0.5.23",
    "vllm": "vllm/vllm-openai:v0.33.0",
}
"""The releases whose command lines and events this module was written for."""

FLAGS: Final[Mapping[EngineType, Mapping[str, str]]] = {
    "treeline": {
        "dtype": "--dtype",
        "quantization": "--quantization",
        "kv_cache_dtype": "--kv-cache-dtype",
        "threads": "--threads",
        "context_length": "--context-length",
        "page_size": "--page-size",
        "max_total_tokens": "--max-total-tokens",
        "memory_fraction": "--mem-fraction",
        "max_running_requests": "--max-running-requests",
        "max_queued_requests": "--max-queued-requests",
        "chunked_prefill_size": "--chunked-prefill-size",
        "schedule_policy": "--schedule-policy",
        "eviction_policy": "--eviction-policy",
    },
    "sglang": {
        "dtype": "--dtype",
        "quantization": "--quantization",
        "kv_cache_dtype": "--kv-cache-dtype",
        "context_length": "--context-length",
        "page_size": "--page-size",
        "max_total_tokens": "--max-total-tokens",
        "memory_fraction": "--mem-fraction-static",
        "max_running_requests": "--max-running-requests",
        "max_queued_requests": "--max-queued-requests",
        "chunked_prefill_size": "--chunked-prefill-size",
        "schedule_policy": "--schedule-policy",
        "eviction_policy": "--radix-eviction-policy",
        "tensor_parallel": "--tp-size",
        "data_parallel": "--dp-size",
    },
    "vllm": {
        "dtype": "--dtype",
        "quantization": "--quantization",
        "kv_cache_dtype": "--kv-cache-dtype",
        "context_length": "--max-model-len",
        "page_size": "--block-size",
        "memory_fraction": "--gpu-memory-utilization",
        "max_running_requests": "--max-num-seqs",
        "chunked_prefill_size": "--max-num-batched-tokens",
        "schedule_policy": "--scheduling-policy",
        "tensor_parallel": "--tensor-parallel-size",
        "data_parallel": "--data-parallel-size",
    },
    "custom": {},
}
"""Setting of `spec.engine` → the engine's flag. A setting that is not here has no meaning for the engine."""

_EVENTS: Final = {
    "publisher": "zmq",
    "endpoint": f"tcp://*:{wire.EVENTS}",
    "replay_endpoint": f"tcp://*:{wire.REPLAY}",
}
"""How SGLang and vLLM are told to publish what their caches hold."""

BUILTIN_START_S: Final = 120
DEFAULT_START_S: Final = 1800
"""Loading, and on GPUs compiling kernels and capturing graphs, which takes minutes whatever the model's size."""
START_S_PER_GIB: Final = 20
"""A network disk at 50 MiB/s; the download has its own container and does not count."""
HUNG_GRACE_S: Final = 15
"""What hangs is killed soon: it has no streams left to finish, and its restart is waited for."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine's container is, apart from what all have in common.

    `drains` tells whether the engine finishes its requests when it is asked to stop.
    """

    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    ports: tuple[tuple[str, int], ...]
    probes: dict[str, dict[str, Any]]
    drains: bool = True
    keys: bool = False
    """Whether it reads the key pair that its KV sockets are secured with."""
    shared_memory: bool = True
    fixed_user: bool = True
    """Whether the image runs as any user that we name."""


def launch(pool: InferencePool, files: Files, images: Images) -> Launch:
    """How the pool's engine is started. `images` are used where the pool names none."""
    match pool.spec.engine.type:
        case "treeline":
            return _treeline(pool, files, images)
        case "sglang":
            return _sglang(pool, files)
        case "vllm":
            return _vllm(pool, files)
        case "custom":
            return _custom(pool, files)


def tells_hits(pool: InferencePool) -> bool:
    """Whether answers say how much of the prompt was cached: not to strangers who share a cache.

    A runtime of ours is told so by the edge, request by request; others by their command lines.
    """
    gateway = pool.spec.gateway
    strangers = gateway.has_clients and not gateway.kept_apart and not gateway.edge.expose_routing
    return pool.spec.engine.type not in ("sglang", "vllm") or not strangers


def start_seconds(pool: InferencePool) -> int:
    """How long a start may take once the weights are on disk. A size that is known can only make it longer."""
    model = pool.spec.model
    least = BUILTIN_START_S if model.source.scheme == "builtin" else DEFAULT_START_S
    return max(least, math.ceil(gib(model.size) * START_S_PER_GIB))


def metrics_port(pool: InferencePool) -> int | None:
    """The port that serves metrics and nothing else; None for engines that serve them on their API's."""
    return _beside(pool, wire.RUNTIME_METRICS) if pool.spec.engine.type == "treeline" else None


def _beside(pool: InferencePool, port: int) -> int:
    """A port of ours, or the next one where the pool has its API there."""
    return port + (pool.spec.engine.port == port)


def _settings(pool: InferencePool) -> list[str]:
    """The flags of all settings that differ from the engine's own defaults."""
    engine = pool.spec.engine
    args = []
    for setting, flag in FLAGS[engine.type].items():
        value = pool.spec.tensor_parallel if setting == "tensor_parallel" else getattr(engine, setting)
        parallel = setting in ("tensor_parallel", "data_parallel")
        if value is not None and not (parallel and value == 1):
            args.append(f"{flag}={value:g}" if isinstance(value, float) else f"{flag}={value}")
    return args


def _treeline(pool: InferencePool, files: Files, images: Images) -> Launch:
    spec = pool.spec
    gpu = spec.accelerator.is_gpu
    args = [f"--model={files.model}", f"--served-model-name={spec.model.served_name}"]
    args += ["--host", "0.0.0.0", "--port", str(spec.engine.port), "--device", "cuda" if gpu else "cpu"]
    # Administration stays on loopback: who may forward a port to the pod, or run a command in it, may administer.
    args += ["--metrics-host", "0.0.0.0", "--metrics-port", str(_beside(pool, wire.RUNTIME_METRICS))]
    args += ["--admin-host", "127.0.0.1", "--admin-port", str(_beside(pool, wire.RUNTIME_ADMIN))]
    args += _settings(pool)
    threads = None if gpu or spec.engine.threads else _cpu_limit(pool)
    if threads is not None:
        args += ["--threads", str(threads)]
    args += ["--curve-dir", KEYS_DIR, "--start-timeout", str(start_seconds(pool))]
    # The kubelet's preStop sleep is the time in which the picker learns that the pod goes.
    args += ["--pre-stop", "0", "--drain-timeout", str(spec.drain.timeout_seconds)]
    return Launch(
        image=spec.engine.image or (images.runtime_cuda if gpu else images.runtime),
        command=spec.engine.command or ("python", "-m", "treeline_runtime"),
        args=(*args, *spec.engine.args),
        env=(("HF_HUB_OFFLINE", "1"),),
        ports=(
            *_kv_ports(spec.engine.port),
            ("load", wire.LOAD),
            ("metrics", _beside(pool, wire.RUNTIME_METRICS)),
        ),
        probes=_probes(pool, _http("/ready"), _http("/live"), period=2),
        keys=True,
        shared_memory=False,
    )


def _sglang(pool: InferencePool, files: Files) -> Launch:
    spec = pool.spec
    args = [f"--model-path={files.model}", f"--served-model-name={spec.model.served_name}"]
    args += ["--host", "0.0.0.0", "--port", str(spec.engine.port)]
    args += [f"--tokenizer-path={files.tokenizer}"] if files.tokenizer else []
    args += [] if spec.accelerator.is_gpu else ["--device", "cpu"]
    args += _settings(pool)
    if spec.engine.page_size is None:
        # Its own default may be one token a page: an event for every token.
        args += ["--page-size", "16"]
    if files.adapters:
        args += ["--lora-paths", *(f"{name}={path}" for name, path in files.adapters.items())]
    args += ["--enable-metrics", *(["--enable-cache-report"] if tells_hits(pool) else [])]
    args += ["--kv-events-config", _compact(_EVENTS)]
    args += ["--load-publish-endpoint", f"tcp://*:{wire.LOAD}"]
    return Launch(
        image=spec.engine.image or DEFAULT_IMAGES["sglang"],
        command=spec.engine.command or ("python3", "-m", "sglang.launch_server"),
        args=(*args, *spec.engine.args),
        env=(("HF_HUB_OFFLINE", "1"),),
        ports=(*_kv_ports(spec.engine.port), ("load", wire.LOAD)),
        # Its health check may generate a token: not for every second.
        probes=_probes(pool, _http("/health"), _http("/health"), period=5, live_period=30),
    )


def _vllm(pool: InferencePool, files: Files) -> Launch:
    spec = pool.spec
    args = [files.model, f"--served-model-name={spec.model.served_name}"]
    args += ["--host", "0.0.0.0", "--port", str(spec.engine.port)]
    args += [f"--tokenizer={files.tokenizer}"] if files.tokenizer else []
    args += _settings(pool)
    if files.adapters:
        args += ["--enable-lora", "--lora-modules"]
        args += [f"{name}={path}" for name, path in files.adapters.items()]
    args += ["--enable-prompt-tokens-details"] if tells_hits(pool) else []
    args += ["--kv-events-config", _compact({"enable_kv_cache_events": True, **_EVENTS})]
    args += ["--shutdown-timeout", str(spec.drain.timeout_seconds)]
    return Launch(
        image=spec.engine.image or DEFAULT_IMAGES["vllm"],
        command=spec.engine.command or ("vllm", "serve"),
        args=(*args, *spec.engine.args),
        # Block hashes start from this seed: the same in every pod, so that equal prefixes have equal hashes.
        env=(("HF_HUB_OFFLINE", "1"), ("PYTHONHASHSEED", "0"), ("VLLM_NO_USAGE_STATS", "1")),
        ports=_kv_ports(spec.engine.port),
        probes=_probes(pool, _http("/health"), _http("/health"), period=5),
    )


def _custom(pool: InferencePool, files: Files) -> Launch:
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


def _kv_ports(http: int) -> tuple[tuple[str, int], ...]:
    return ("http", http), ("kv-events", wire.EVENTS), ("kv-replay", wire.REPLAY)


def _http(path: str) -> dict[str, Any]:
    return http_get(path, "http")


def _probes(
    pool: InferencePool, ready: dict[str, Any], live: dict[str, Any], *, period: int, live_period: int = 10
) -> dict[str, dict[str, Any]]:
    tries = math.ceil(start_seconds(pool) / period)
    hung = {"terminationGracePeriodSeconds": HUNG_GRACE_S}
    return {
        "startupProbe": probe(ready, period, tries, timeout_s=5) | hung,
        "readinessProbe": probe(ready, period, 2, timeout_s=5),
        "livenessProbe": probe(live, live_period, 6, timeout_s=10) | hung,
    }


def _cpu_limit(pool: InferencePool) -> int | None:
    """Whole cores that the pool limits a pod to: more threads than that only wait for each other."""
    asked = pool.spec.engine.resources or Resources()
    cores = quantity(asked.limits.get("cpu"))
    return max(1, int(cores)) if cores is not None else None


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
