"""A real SGLang on the CPU, without its kernels: attention and the rest by torch (`scripts/engine_cpu.sh`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from support.real_engines.server import Installation, Server

INSTALLATION = Installation("SGLang", "sglang-cpu", "TREELINE_SGLANG_CPU")
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Sglang(Server):
    """SGLang on the CPU: see the module."""

    engine: ClassVar[str] = "sglang"
    installation: ClassVar[Installation] = INSTALLATION
    block_tokens: ClassVar[int] = 16

    def command(self, max_tokens: int = 4096) -> list[str]:
        settings: dict[str, object] = {
            "--model-path": self.model,
            "--served-model-name": self.served_model,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--device": "cpu",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--context-length": max_tokens,
            "--max-running-requests": 16,
            "--page-size": self.block_tokens,
            "--max-total-tokens": self.blocks * self.block_tokens,
            "--kv-events-config": self.kv_events(),
        }
        if self.load_port:
            settings["--load-publish-endpoint"] = f"tcp://*:{self.load_port}"
        argv = [str(self.installation.interpreter()), "-m", "sglang.launch_server"]
        argv += [str(word) for pair in settings.items() for word in pair]
        argv += ["--enable-metrics", "--enable-cache-report", "--sleep-on-idle", "--log-level", "warning"]
        return [*argv, *self.more]

    def environment(self) -> Mapping[str, str]:
        return _ENVIRONMENT

    def forget(self) -> None:
        """Empty the cache. SGLang sends the event at once."""
        self.ask("POST", "/flush_cache", None)
