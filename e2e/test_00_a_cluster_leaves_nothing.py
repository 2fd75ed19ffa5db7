"""A cluster of the `local` provider leaves nothing, whenever its `up` is killed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import packages
from e2e.cluster.leftovers import compare, snapshot
from e2e.cluster.owned import until
from e2e.cluster.place import ClusterError, Home

CLUSTER = [sys.executable, "-m", "e2e.cluster"]
OPTIONS = ["--provider", "local", "--without-images", "--no-install"]

pytestmark = [
    pytest.mark.skipif(packages.unfit() is not None, reason=f"no local cluster: {packages.unfit()}"),
    pytest.mark.skipif(Home.default().path.exists(), reason="a cluster is up: its addresses are taken"),
    pytest.mark.skipif(
        bool(packages.missing(build=False)), reason="packages are missing, which `make cluster-up` installs"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "home"
    monkeypatch.setenv("TREELINE_E2E_HOME", str(path))
    monkeypatch.delenv("CLUSTER_KEEP", raising=False)
    before = snapshot()
    yield path
    run("down")
    # the kernel takes down namespaces a moment after their last process
    with contextlib.suppress(ClusterError):
        until(lambda: not compare(before, snapshot()), "nothing to be left")
    assert compare(before, snapshot()) == []


def run(word: str, *more: str) -> subprocess.CompletedProcess[str]:
    options = [*OPTIONS, *more]
    done = subprocess.run([*CLUSTER, word, *options], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_up_twice_and_down(home: Path) -> None:
    first = run("up")
    assert f"export KUBECONFIG={home}/kubeconfig" in first.stdout
    assert "the cluster is up" in run("up").stderr
    assert '"state": "up"' in run("status").stdout


def test_two_nodes(home: Path) -> None:
    run("up", "--nodes", "2")


@pytest.mark.parametrize("logged", ["", "node-1.init", "node-1.kube-apiserver", "node-1.kubelet", "node-1.kube-proxy"])
def test_up_is_killed_when(home: Path, logged: str) -> None:
    """`up` is killed as soon as that program was started (the empty name: at once)."""
    with subprocess.Popen([*CLUSTER, "up", *OPTIONS], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as up:
        until((home / "logs" / f"{logged}.log").exists if logged else home.exists, f"{logged} to start", 100)
        os.kill(up.pid, signal.SIGKILL)


def test_an_interrupted_up_can_be_resumed(home: Path) -> None:
    with subprocess.Popen(
        [*CLUSTER, "up", *OPTIONS],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # a shell's background job ignores interrupts, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as up:
        until((home / "logs/node-1.kubelet.log").exists, "the kubelet to start", 100)
        os.kill(up.pid, signal.SIGINT)
        up.wait(30)
    assert "removing what an earlier up left" in run("up").stderr
