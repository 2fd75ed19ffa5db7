"""Ablations of server and language, after figure 8 of SGLang's paper (Zheng et al., 2024), and their servers."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treeline_bench.processes import child, free_ports

START_S = 600.0
"""Seconds for the start of a server with a large model: random weights, kernels and graphs."""
CACHE_TOKENS = 20_480
"""Tokens that fit beside a 7B model in float16 (512 KiB a token) in an A10G's 24 GB, the paper's machine."""
PAGE_TOKENS = 1
"""The page size of the paper."""


@dataclass(frozen=True)
class Ablation:
    """Flags of a server, and how programs run on it."""

    name: str
    title: str
    meaning: str
    cache: str = "radix"
    """`--prefix-cache`."""
    policy: str = "lpm"
    """`--schedule-policy`."""
    parallel: bool = True
    """Branches of a program run in parallel."""
    order: Literal["dfs", "given"] = "dfs"
    """The order of a batch: equal beginnings together, or shuffled."""
    hints: bool = True
    """Forks and batches send their shared beginning ahead."""

    @property
    def flags(self) -> list[str]:
        """For `treeline serve`."""
        return ["--prefix-cache", self.cache, "--schedule-policy", self.policy]


NONE = Ablation(
    "none",
    "No cache, no parallelism",
    "neither cache nor parallel branches: what throughput is compared with",
    cache="off",
    parallel=False,
    order="given",
    hints=False,
)
FULL = Ablation("full", "Full", "everything")
ABLATIONS: dict[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        NONE,
        # Without a cache, hints only cost time.
        Ablation("no_cache", "No cache", "every prompt is computed", cache="off", order="given", hints=False),
        Ablation("fcfs", "First come", "requests in the order in which they come", policy="fcfs", order="given"),
        Ablation("no_parallelism", "No parallelism", "branches of a program one after another", parallel=False),
        Ablation("no_hint", "No hint", "forks do not say what their branches begin with", hints=False),
        FULL,
    )
}


@dataclass(frozen=True)
class Serving:
    """The settings that all servers of a run share."""

    model: Path
    device: str = "auto"
    cache_tokens: int = CACHE_TOKENS
    args: str = ""
    """More words for `treeline serve`; they come last and win."""

    def command(self, ablation: Ablation, port: int, admin_port: int) -> list[str]:
        argv = [sys.executable, "-m", "treeline", "serve", "--model", str(self.model), "--device", self.device]
        argv += ["--port", str(port), "--admin-port", str(admin_port), "--metrics-port", "off", "--no-events"]
        argv += ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(self.cache_tokens)]
        # On two cores, one thread computes and one does all else: more threads would wait for each other.
        argv += ["--threads", "1", "--log-level", "warning"]
        return [*argv, *ablation.flags, *shlex.split(self.args)]

    @contextlib.contextmanager
    def start(self, ablation: Ablation, folder: Path) -> Iterator[str]:
        """The URL of a new server, stopped at the end of the block. Raises ChildFailed."""
        port, admin_port = free_ports(2)
        url = f"http://127.0.0.1:{port}"
        with child(f"serve-{ablation.name}", self.command(ablation, port, admin_port), folder) as process:
            process.wait_ready(f"{url}/ready", START_S)
            yield url
