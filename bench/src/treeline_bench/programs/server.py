"""Servers, one for each ablation."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treeline_bench.processes import child, free_ports
from treeline_bench.programs.ablations import Ablation

START_S = 600.0
"""A large model with random weights, kernels and graphs."""
CACHE_TOKENS = 20_480
"""What a 7B model in float16 (512 KiB a token) leaves of an A10G's 24 GB: the paper's machine."""
PAGE_TOKENS = 1
"""The paper's."""


@dataclass(frozen=True)
class Serving:
    """What all servers of a run have in common."""

    model: Path
    device: str = "auto"
    cache_tokens: int = CACHE_TOKENS
    args: str = ""
    """More words for `treeline serve`, which come last and so win."""

    def command(self, ablation: Ablation, port: int, admin_port: int) -> list[str]:
        argv = [sys.executable, "-m", "treeline", "serve", "--model", str(self.model), "--device", self.device]
        argv += ["--port", str(port), "--admin-port", str(admin_port), "--metrics-port", "off", "--no-events"]
        argv += ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(self.cache_tokens)]
        # With two cores, a thread that computes and one for everything else: more would wait for each other.
        argv += ["--threads", "1", "--log-level", "warning"]
        return [*argv, *ablation.flags, *shlex.split(self.args)]

    @contextlib.contextmanager
    def start(self, ablation: Ablation, folder: Path) -> Iterator[str]:
        """The URL of a fresh server; it ends with the block. Raises ChildFailed."""
        port, admin_port = free_ports(2)
        url = f"http://127.0.0.1:{port}"
        with child(f"serve-{ablation.name}", self.command(ablation, port, admin_port), folder) as process:
            process.wait_ready(f"{url}/ready", START_S)
            yield url
