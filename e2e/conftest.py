"""A cluster for the journeys, with Treeline in it; removed at the end unless CLUSTER_KEEP=1."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from treeline_bench.control_plane import Missing, programs

from e2e.cluster.place import ROOT, ClusterError
from e2e.cluster.progress import Progress
from e2e.cluster.providers import Provider, choose, every
from e2e.kit.figures import KEPT, Figures
from e2e.kit.kube import Kube
from e2e.kit.system import Installed, installed_and_running
from e2e.kit.traffic import Report, Stream

JOURNEY_S = 1800
NODES = 2
"""Nodes of a cluster that is made for the journeys: one of them is drained."""
_BEGUN = pytest.StashKey[float]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give journeys a longer time limit than tests."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(JOURNEY_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build programs and images before the first test: their minutes count against no test and are visible."""
    asked = any("kube" in item.fixturenames for item in session.items if isinstance(item, pytest.Function))
    if asked and not session.config.option.collectonly:
        with suppress(ClusterError):  # the fixture says why there is no cluster
            _provider().prepare()


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> Iterator[Kube]:
    """The cluster of PROVIDER (auto), started if it is not running; skipped with the reason if none is available."""
    try:
        provider = _provider()
        was_up = provider.status()["state"] == "up"
        if not was_up:
            provider = _provider(NODES)
    except ClusterError as reason:
        pytest.skip(str(reason))
    begun = time.monotonic()
    kubeconfig = provider.up()
    if not was_up:
        figures.add("e2e.cluster_up_s", time.monotonic() - begun)
    yield Kube(kubeconfig, _commands(tmp_path_factory.mktemp("bin")))
    if not was_up and os.environ.get("CLUSTER_KEEP") != "1":
        provider.down()


def _provider(nodes: int | None = None) -> Provider:
    images = os.environ.get("E2E_IMAGES", "") != "keep"  # those of an earlier `up` will do
    return choose(os.environ.get("PROVIDER", "auto"), every(Progress(), nodes=nodes, images=images))


def _commands(folder: Path) -> Path | None:
    """Return the folders of kubectl and helm that the control plane's build has; without it, those of PATH."""
    try:
        found = programs("kubernetes", "helm")
    except Missing:
        return None
    (folder / "kubectl").symlink_to(found["kubernetes"] / "kubectl")
    (folder / "helm").symlink_to(found["helm"] / "helm")
    return folder


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_BEGUN] = time.monotonic()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """The journeys' measurements, written at the end. Their duration is recorded only when all of them ran."""
    found = Figures()
    yield found
    files = {item.path.name for item in request.session.items}
    if files >= {path.name for path in Path(__file__).parent.glob("test_*.py")}:
        found.add("e2e.duration_s", time.monotonic() - request.session.stash[_BEGUN])
    found.write()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the pods' logs of a journey that failed: the pods disappear with their namespace."""
    report = yield
    treeline = item.funcargs.get("treeline")
    if report.when == "call" and report.failed and isinstance(treeline, Installed):
        path = _kept(item.name, "log")
        path.write_text(treeline.logs(check=False))
        report.sections.append(("What the pods said", str(path)))
    return report


@pytest.fixture(scope="session")
def installed(kube: Kube) -> Kube:
    """The cluster with Treeline's chart installed and its pods running."""
    installed_and_running(kube)
    return kube


@pytest.fixture
def treeline(installed: Kube, request: pytest.FixtureRequest) -> Iterator[Installed]:
    """A namespace of the test's own, with restricted Pod Security; its contents are removed at the end."""
    with _namespace(installed, request.node.name) as found:
        yield found


@pytest.fixture(scope="module")
def of_this_file(installed: Kube, request: pytest.FixtureRequest) -> Iterator[Installed]:
    """One installation for all tests of a file, where new pods for each would take longer than the tests."""
    with _namespace(installed, request.path.stem) as found:
        yield found


@contextmanager
def _namespace(kube: Kube, title: str) -> Iterator[Installed]:
    words = re.sub(r"[^a-z0-9]+", "-", title.lower())
    title = re.sub(r"^test-(\d\d-)?", "", words)[:40].strip("-")
    name = f"{title}-{uuid.uuid4().hex[:5]}"  # that of an earlier run may still be going
    kube.kubectl("create", "namespace", name)
    kube.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield Installed(kube, name)
    kube.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def _kept(test: str, kind: str) -> Path:
    folder = ROOT / KEPT
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{test}.{kind}"


@pytest.fixture
def kept(request: pytest.FixtureRequest, figures: Figures) -> Iterator[Path]:
    """The file that records a journey's streams. They count in the figures, unless the journey kills servers
    (chaos)."""
    path = _kept(request.node.name, "jsonl")
    path.unlink(missing_ok=True)
    yield path
    if path.exists() and request.node.get_closest_marker("chaos") is None:
        report = Report([Stream(**json.loads(line)) for line in path.read_text().splitlines()])
        figures.add("e2e.streams", len(report.streams))
        figures.add("e2e.dropped_streams", len(report.dropped))
