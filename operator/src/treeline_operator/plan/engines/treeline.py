"""Our own runtime: it has ports of its own for metrics and administration, and keys for its KV sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from treeline_wire import ports as wire

from treeline_operator.api.engine import EngineType
from treeline_operator.api.parts import Resources
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files
from treeline_operator.plan.engines.base import Launch, http, kv_ports, probes, settings, start_seconds, traces
from treeline_operator.quantity import quantity
from treeline_operator.world import Images

KEYS_DIR: Final = "/var/run/treeline/keys"


class Treeline:
    """See the module."""

    name: EngineType = "treeline"
    hits_by_flag = False
    serves_tokenizer = True
    publishes = True
    untold: Mapping[str, str] = {}
    flags: Mapping[str, str] = {
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
    }

    def metrics_port(self, pool: InferencePool) -> int | None:
        """Always one of its own."""
        return _beside(pool, wire.RUNTIME_METRICS)

    def launch(self, pool: InferencePool, files: Files, images: Images) -> Launch:
        """How it is started."""
        spec, metrics = pool.spec, _beside(pool, wire.RUNTIME_METRICS)
        gpu = spec.accelerator.is_gpu
        args = [f"--model={files.model}", f"--served-model-name={spec.model.served_name}"]
        args += ["--host", "0.0.0.0", "--port", str(spec.engine.port), "--device", "cuda" if gpu else "cpu"]
        # Administration stays on loopback: who may forward a port to the pod, or run a command in it, may administer.
        args += ["--metrics-host", "0.0.0.0", "--metrics-port", str(metrics)]
        args += ["--admin-host", "127.0.0.1", "--admin-port", str(_beside(pool, wire.RUNTIME_ADMIN))]
        args += settings(pool, self.flags)
        threads = None if gpu or spec.engine.threads else _cpu_limit(pool)
        if threads is not None:
            args += ["--threads", str(threads)]
        args += ["--curve-dir", KEYS_DIR, "--start-timeout", str(start_seconds(pool))]
        # The kubelet's preStop sleep is the time in which the picker learns that the pod goes.
        args += ["--pre-stop", "0", "--drain-timeout", str(spec.drain.timeout_seconds)]
        args += ["--tracing"] if spec.tracing else []
        return Launch(
            image=spec.engine.image or (images.runtime_cuda if gpu else images.runtime),
            command=spec.engine.command or ("python", "-m", "treeline_runtime"),
            args=(*args, *spec.engine.args),
            env=(("HF_HUB_OFFLINE", "1"), *traces(pool)),
            ports=(*kv_ports(pool, ("load", wire.LOAD)), ("metrics", metrics)),
            probes=probes(pool, http("/ready"), http("/live"), period=2),
            keys=True,
            shared_memory=False,
            downloads=True,
        )


def _beside(pool: InferencePool, port: int) -> int:
    """A port of ours, or the next one where the pool has its API there."""
    return port + (pool.spec.engine.port == port)


def _cpu_limit(pool: InferencePool) -> int | None:
    """Whole cores that the pool limits a pod to: more threads than that only wait for each other."""
    asked = pool.spec.engine.resources or Resources()
    cores = quantity(asked.limits.get("cpu"))
    return max(1, int(cores)) if cores is not None else None
