"""The tests' control plane: fixtures, and ports that parallel test workers do not share.

Nothing of it outlives the test process. The programs come from `scripts/control_plane.sh`; the class itself is the
benchmarks' (`treeline_bench.control_plane`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from treeline_bench import control_plane as core
from treeline_bench.context import ROOT
from treeline_bench.control_plane import BUILD, CONTROLLERS, ControlPlaneFailed, Missing, programs

from support.ports import free_ports

__all__ = [
    "BUILD",
    "CONTROLLERS",
    "ROOT",
    "ControlPlane",
    "ControlPlaneFailed",
    "Missing",
    "control_plane",
    "control_plane_or_skip",
    "namespace",
    "programs",
    "programs_or_skip",
]


class ControlPlane(core.ControlPlane):
    """The benchmarks' control plane, on ports of this test worker."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"ports": free_ports(3), **options})


def programs_or_skip(*names: str) -> dict[str, Path]:
    """Return each component's folder of programs; if one is not built, skip the test and say how to build it. With the
    variable CI set they must exist, except those that `make control-plane` does not build."""
    try:
        return programs(*names)
    except Missing as missing:
        built = {"kubernetes", "etcd", "helm", "coredns"}.issuperset(names)
        said = f"{missing}" + ("\nor: make control-plane" if built else "")
        if built and os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)


def control_plane_or_skip(**options: Any) -> ControlPlane:
    """Return a control plane, not started yet; without its programs the test is skipped."""
    programs_or_skip("kubernetes", "etcd")
    return ControlPlane(**options)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with our CRDs and the controllers, shared by all tests of the process."""
    plane = control_plane_or_skip()
    plane.start(crds=(ROOT / "crds").is_dir())
    yield plane
    plane.stop()


def _await_default_account(control_plane: ControlPlane, name: str) -> None:
    """Wait until the namespace has its account: the controller manager makes it, and no pod is admitted before."""
    deadline = time.monotonic() + 30
    while True:
        try:
            control_plane.request("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")
            return
        except ControlPlaneFailed:
            assert time.monotonic() < deadline, f"namespace {name} gets no ServiceAccount"
            time.sleep(0.02)


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """Create a namespace; it is deleted afterwards, without waiting."""
    created = control_plane.request(
        "POST",
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "test-"}},
    )
    name = str(created["metadata"]["name"])
    _await_default_account(control_plane, name)
    yield name
    control_plane.request("DELETE", f"/api/v1/namespaces/{name}")
