"""vLLM. Flags and pages are those of 0.33 (`vllm serve --help`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from treeline_operator.api.engine import EngineType
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files
from treeline_operator.plan.engines.base import (
    Launch,
    chat_template,
    compact,
    http,
    kv_annotations,
    kv_events,
    kv_ports,
    probes,
    settings,
    tells_hits,
    traces,
)
from treeline_operator.world import Images

IMAGE: Final = "vllm/vllm-openai:v0.33.0"
"""The release whose command line and events this module was written for."""


class Vllm:
    """See the module."""

    name: EngineType = "vllm"
    hits_by_flag = True
    serves_tokenizer = False
    publishes = True
    untold: Mapping[str, str] = {
        "--chat-template": "model.chatTemplateRef is told to both",
        "--tokenizer": "model.tokenizer is told to both",
        "--api-key": "the picker has none; the gateway takes gateway.standalone.apiKeysSecretRef",
    }
    flags: Mapping[str, str] = {
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
    }

    def metrics_port(self, pool: InferencePool) -> int | None:
        """On its API's port."""
        return None

    def launch(self, pool: InferencePool, files: Files, images: Images) -> Launch:
        """How it is started."""
        spec = pool.spec
        args = [files.model, f"--served-model-name={spec.model.served_name}"]
        args += ["--host", "0.0.0.0", "--port", str(spec.engine.port)]
        args += [f"--tokenizer={files.tokenizer}"] if files.tokenizer else []
        args += chat_template(pool)
        args += settings(pool, self.flags)
        if files.adapters:
            args += ["--enable-lora", "--lora-modules"]
            args += [f"{name}={path}" for name, path in files.adapters.items()]
        args += ["--enable-prompt-tokens-details"] if tells_hits(pool) else []
        args += ["--kv-events-config", compact({"enable_kv_cache_events": True, **kv_events()})]
        args += ["--shutdown-timeout", str(spec.drain.timeout_seconds)]
        args += ["--otlp-traces-endpoint", spec.tracing.endpoint] if spec.tracing else []
        return Launch(
            image=spec.engine.image or IMAGE,
            command=spec.engine.command or ("vllm", "serve"),
            args=(*args, *spec.engine.args),
            # Block hashes start from this seed: the same in every pod, so that equal prefixes have equal hashes.
            env=(
                ("HF_HUB_OFFLINE", "1"),
                ("PYTHONHASHSEED", "0"),
                ("VLLM_NO_USAGE_STATS", "1"),
                *traces(pool, ("OTEL_SERVICE_NAME", "vllm")),
            ),
            ports=tuple(kv_ports(pool)),
            # Its health page asks whether the engine's process lives, which costs nothing; it answers 503 where not.
            probes=probes(pool, http("/health"), http("/health"), period=5),
            caches=(("VLLM_CACHE_ROOT", "vllm"),),
            annotations=kv_annotations(pool),
        )
