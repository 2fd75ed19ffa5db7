"""The pods that a picker chooses from: HTTP servers that speak as vLLM does, each on a loopback address of its own.

They answer a picker's probes (health, models, metrics). They get no requests: the suite plays the proxy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from treeline_bench.processes import free_ports

MODEL: Final = "conformance"
TARGET: Final = "conformance-v2"
"""Another model, the target of rewrites."""
MODELS: Final = (MODEL, TARGET)
ADDRESSES: Final = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_OTHERS: Final = "127.0.0.9"


@dataclass
class Pod:
    """One pod. It keeps each setting until the next one replaces it."""

    name: str
    ip: str
    ports: tuple[int, ...]
    ready: bool = True
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.05
    asked: set[str] = field(default_factory=set)
    _runners: list[web.AppRunner] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """The endpoint at its first port."""
        return self.endpoints[0]

    @property
    def endpoints(self) -> list[str]:
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return [f"{host}:{port}" for port in self.ports]

    async def start(self) -> None:
        for port in self.ports:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._serve)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, self.ip, port).start()
            self._runners.append(runner)

    async def stop(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        self.asked.add(request.path)
        match request.path:
            case "/health" | "/ready" | "/live" | "/ping":
                return web.Response(status=200 if self.ready else 503)
            case "/v1/models" if self.ready:
                return web.json_response({"object": "list", "data": [_model(name) for name in MODELS]})
            case "/metrics":
                return web.Response(text=self._metrics(), content_type="text/plain")
            case "/version":
                return web.json_response({"version": "0.32.0"})
        return web.json_response({"error": {"message": "not found"}}, status=404 if self.ready else 503)

    def _metrics(self) -> str:
        told = {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": self.kv_usage,
        }
        lines = [f'# TYPE vllm:{name} gauge\nvllm:{name}{{model_name="{MODEL}"}} {n}' for name, n in told.items()]
        lines.append("# TYPE vllm:cache_config_info gauge")
        lines.append('vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0')
        lines.append("# TYPE vllm:lora_requests_info gauge")
        lines.append('vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1.0')
        return "\n".join(lines) + "\n"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": name, "parent": None}


def pods(port: int = 0) -> list[Pod]:
    """Return pods with one port each, the same for all, as in an InferencePool; 0 means a free one."""
    ports = (port or free_ports(1, addresses=(*ADDRESSES, _OTHERS))[0],)
    return [Pod(f"pod-{at}", address, ports) for at, address in enumerate(ADDRESSES)]
