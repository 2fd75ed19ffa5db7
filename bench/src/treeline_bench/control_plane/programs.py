"""Finds the programs of the control plane, which `scripts/control_plane.sh` builds."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from treeline_bench.context import ROOT, BenchmarkError

BUILD = "scripts/control_plane.sh"


class Missing(BenchmarkError):
    """The programs are not built; the message says how to build them."""


@cache
def programs(*names: str) -> dict[str, Path]:
    """Component (``kubernetes``, ``etcd``, ``helm``) → the folder of its programs. Raises Missing."""
    try:
        done = subprocess.run(
            [str(ROOT / BUILD), "--check", *names], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        raise Missing(f"{BUILD} cannot be run ({error}): this needs a checkout of the repository") from error
    if done.returncode:
        raise Missing(f"{done.stderr.strip()}\nrun: {BUILD} {' '.join(names)}   (minutes, once)")
    return dict(zip(names, map(Path, done.stdout.split()), strict=True))
