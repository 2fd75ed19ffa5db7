"""Two real servers of another engine in place of a stack's runtimes, each with a listener from the beginning."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from treeline.up.plan import ChildSpec
from treeline.up.run import envoy_config
from treeline_bench.context import ROOT
from treeline_operator.envoy import bootstrap_json
from treeline_wire.tiny_model import tiny_model

from support.real_engines.server import Server
from support.real_engines.sglang import Sglang
from support.real_engines.traffic import Shape
from support.real_engines.vllm import Vllm
from support.real_engines.witness import Witness
from support.stack import READY_TIMEOUT_S, Process, Stack, until

KINDS: dict[str, type[Server]] = {"vllm": Vllm, "sglang": Sglang}
ADAPTER, RANK = "adapter-1", 8
TIMED_PICKER = ROOT / "epp" / "benchmarks" / "timed_picker.py"


class EngineStack(Stack):
    """The processes `KIND-0`, `KIND-1`, `picker` and `envoy`; the picker logs its decisions, and times events."""

    def __init__(self, folder: Path, kind: str, shape: Shape, cache_tokens: int) -> None:
        self.names = (f"{kind}-0", f"{kind}-1")
        super().__init__(folder, replicas=len(self.names), log_level="debug")
        config = dataclasses.replace(envoy_config(self.options), engines=(kind,))
        (folder / "envoy.json").write_text(bootstrap_json(config))
        self.kind = KINDS[kind]
        self.times = folder / "times.jsonl"
        self.servers: dict[str, Server] = {}
        more = _with_adapter(kind, folder / ADAPTER)
        for name, place in zip(self.names, list(super().runtimes), strict=True):
            ports = {use: port for use, (_, port) in self.processes.pop(place).spec.ports.items()}
            self.servers[name] = self.kind(
                name,
                ports["port"],
                ports["events-port"],
                ports["replay-port"],
                cache_tokens // self.kind.block_tokens,
                tiny_model(),
                load_port=ports["load-port"],
                more=more,
            )
            self.processes[name] = Process(_spec(self.servers[name], shape.longest), folder / f"{name}.log")
        self.processes = {
            name: self.processes[name] for name in (*self.names, "picker", "envoy")
        }  # so that errors name them
        picker = self.processes["picker"].spec
        flags = [word.replace("runtime-", f"{kind}-") for word in picker.argv[3:]]
        flags += ["--tokenizer", f"tiny={tiny_model()}", "--log-format", "json"]  # decisions() reads its log
        argv = (sys.executable, str(TIMED_PICKER), str(self.times), *flags)
        self.processes["picker"].spec = dataclasses.replace(picker, argv=argv)
        self.witnesses = {name: Witness(server.events_port) for name, server in self.servers.items()}

    @property
    def runtimes(self) -> list[str]:
        return list(self.names)

    def start(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start processes. New servers empty their caches once more, so that listeners miss nothing."""
        super().start(*names, timeout_s=timeout_s)
        for name in self.names:
            if not names or name in names:
                self.servers[name].forget()

    def announced(self, name: str) -> set[int]:
        """Return the blocks that the engine has announced as held."""
        assert self.witnesses[name].missed == 0, "the witness did not hear everything"
        return self.witnesses[name].blocks

    def decisions(self) -> list[dict[str, Any]]:
        """Return the picker's decisions, one log record for each routed request."""
        lines = self.processes["picker"].log_path.read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["message"] == "decision"]

    def followed(self) -> bool:
        """Return whether the picker has applied all published events."""
        live = [f'treeline_epp_kv_subscriptions{{state="{state}"}}' for state in ("live", "checking")]
        return sum(self.metrics().get(name, 0.0) for name in live) == len(self.names)

    def subscriptions(self) -> dict[str, float]:
        """Return the metrics of the picker's subscriptions."""
        return {name: value for name, value in self.metrics().items() if "kv_subscription" in name}

    def ask(self, name: str, prompt: str, **fields: Any) -> dict[str, Any]:
        """Send one completion to a server itself, past Envoy and picker."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **fields}
        answer = self.http.post(f"{self.servers[name].url}/v1/completions", json=body)
        return dict(answer.raise_for_status().json())


def _with_adapter(kind: str, folder: Path) -> tuple[str, ...]:
    """Return the flags that serve an adapter of random numbers. SGLang gets none: its adapters need pinned memory,
    which needs a GPU."""
    if kind == "sglang":
        return ()
    return ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={_adapter(folder)}")


def _adapter(folder: Path) -> Path:
    """Write a LoRA adapter for the tiny model, as PEFT does."""
    config = json.loads((tiny_model() / "config.json").read_text())
    wide = config["num_attention_heads"] * config["head_dim"]
    rng, weights = np.random.default_rng(0), {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = rng.normal(0, 0.1, (RANK, config["hidden_size"])).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = rng.normal(0, 0.1, (wide, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def _spec(server: Server, longest: int) -> ChildSpec:
    return ChildSpec(
        name=server.name,
        argv=tuple(server.command(longest)),
        ready_url=f"{server.url}/health",
        ports={"port": ("127.0.0.1", server.port)},
        env=server.environment(),
    )


@contextmanager
def running_engines(folder: Path, kind: str, shape: Shape, cache_tokens: int) -> Iterator[EngineStack]:
    """Run a stack until the end of the block; ready and followed."""
    stack = EngineStack(folder, kind, shape, cache_tokens)
    with ExitStack() as listening:
        for witness in stack.witnesses.values():
            listening.enter_context(witness)
        try:
            stack.start(timeout_s=stack.kind.start_s)
            until(stack.followed, "the picker follows both engines", state=lambda: stack.log("picker"))
            yield stack
        finally:
            stack.close()
