"""SGLang. Flags, health pages and the levels of its keys are those of 0.5.23 (`sglang.launch_server --help`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from treeline_wire import ports as wire

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
)
from treeline_operator.world import Images

IMAGE: Final = "lmsysorg/sglang:v0.5.23"
"""The release whose command line and events this module was written for."""
PAGE_SIZE: Final = 16
"""Its own default may be one token a page: an event for every token."""
_ADMIN_KEY: Final = "SGLANG_ADMIN_API_KEY"
_HEALTH_TIMEOUT_S: Final = 20
"""For so long its health check waits for a token (SGLANG_HEALTH_CHECK_TIMEOUT)."""


class SGLang:
    """See the module."""

    name: EngineType = "sglang"
    hits_by_flag = True
    serves_tokenizer = False
    publishes = True
    untold: Mapping[str, str] = {
        "--chat-template": "model.chatTemplateRef is told to both",
        "--tokenizer-path": "model.tokenizer is told to both",
        "--api-key": "the picker has none; the gateway takes gateway.standalone.apiKeysSecretRef",
    }
    flags: Mapping[str, str] = {
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
    }

    def metrics_port(self, pool: InferencePool) -> int | None:
        """On its API's port."""
        return None

    def launch(self, pool: InferencePool, files: Files, images: Images) -> Launch:
        """How it is started."""
        spec = pool.spec
        args = [f"--model-path={files.model}", f"--served-model-name={spec.model.served_name}"]
        args += ["--host", "0.0.0.0", "--port", str(spec.engine.port)]
        args += [f"--tokenizer-path={files.tokenizer}"] if files.tokenizer else []
        args += chat_template(pool)
        args += [] if spec.accelerator.is_gpu else ["--device", "cpu"]
        args += settings(pool, self.flags)
        if spec.engine.page_size is None:
            args += ["--page-size", str(PAGE_SIZE)]
        if files.adapters:
            args += ["--lora-paths", *(f"{name}={path}" for name, path in files.adapters.items())]
        args += ["--enable-metrics", *(["--enable-cache-report"] if tells_hits(pool) else [])]
        args += ["--kv-events-config", compact(kv_events())]
        args += ["--load-publish-endpoint", f"tcp://*:{wire.LOAD}"]
        # The kubelet replaces it as it starts the container: neither the Deployment nor the Pod has the key itself.
        args += ["--admin-api-key", f"$({_ADMIN_KEY})"]
        return Launch(
            image=spec.engine.image or IMAGE,
            command=spec.engine.command or ("python3", "-m", "sglang.launch_server"),
            args=(*args, *spec.engine.args),
            # /health says then whether it has started and does not end, at once; /health_generate is a token that comes
            # back from the devices, or any other that did: asked often it would be load, asked never a hung scheduler
            # would go on as healthy.
            env=(("HF_HUB_OFFLINE", "1"), ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")),
            ports=tuple(kv_ports(pool, ("load", wire.LOAD))),
            probes=probes(
                pool,
                http("/health"),
                http("/health_generate"),
                period=5,
                live_period=30,
                live_timeout=_HEALTH_TIMEOUT_S,
            ),
            caches=(("SGLANG_CACHE_DIR", "sglang"), ("SGLANG_DG_CACHE_DIR", "deep-gemm")),
            admin_key=_ADMIN_KEY,
            annotations=kv_annotations(pool),
        )
