"""The helm that the project builds, for tests that render the chart."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.control_plane import programs_or_skip

CHART = Path(__file__).parents[2] / "charts" / "treeline"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm; if it is not built, the test is skipped."""
    program = programs_or_skip("helm")["helm"] / "helm"
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=240, check=False)


def render(*options: str, namespace: str = "treeline-system", release: str = "treeline") -> list[dict[str, Any]]:
    """Return the chart's objects; a failure has helm's message."""
    return documents(_rendered(options, namespace, release))


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML text, parsed by the loader in C: renders are long, and the one in Python takes a
    second each."""
    return [item for item in yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if item]


@cache
def _rendered(options: tuple[str, ...], namespace: str, release: str) -> str:
    done = run("template", release, str(CHART), "--namespace", namespace, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout
