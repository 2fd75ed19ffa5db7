"""The previous chart is upgraded, uninstalled and installed again under traffic; in the end nothing is left."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from e2e.cluster.place import ROOT
from e2e.kit.kube import Kube
from e2e.kit.system import CHART, SYSTEM, Installed, install, installed_and_running, pool, uninstall
from e2e.kit.traffic import traffic

CRDS = ("inferencepools.treeline.dev", "inferencemodels.treeline.dev")
NEW_FIELD = "paused"
"""A field of a pool's ``rollout`` that the previous chart does not know."""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the previous chart: a lower version, whose definition of a pool lacks a field."""
    chart = tmp_path_factory.mktemp("former") / "treeline"
    shutil.copytree(ROOT / CHART, chart)
    about = chart / "Chart.yaml"
    about.write_text(re.sub(r"^version: .*$", "version: 0.0.9", about.read_text(), flags=re.MULTILINE))
    crd = chart / "templates/crds/inferencepools.yaml"
    # The field in the default of its parent; its own lines, and those below that are indented deeper.
    field = re.compile(rf"^ +{NEW_FIELD}: .*\n|^( +){NEW_FIELD}:\n(?:\1 +.*\n)+", re.MULTILINE)
    text, count = field.subn("", crd.read_text())
    assert count == 2
    crd.write_text(text)
    return chart


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def uids(treeline: Installed) -> set[str]:
    return {p["metadata"]["uid"] for part in ("runtime", "epp", "edge") for p in treeline.pods(part)}


def is_paused(treeline: Installed) -> bool:
    """Set the new field. Return whether the API server keeps it."""
    treeline.change("tiny", rollout={NEW_FIELD: True})
    return bool((treeline.pool("tiny")["spec"].get("rollout") or {}).get(NEW_FIELD))


def test_an_upgrade_and_a_reinstall_restart_no_pods(treeline: Installed, former: Path, kept: Path) -> None:
    kube = treeline.kube
    uninstall(kube)
    installed_and_running(kube, chart=str(former))
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    before = uids(treeline)
    assert not is_paused(treeline)
    with traffic(treeline.url(), kept=kept) as driver:
        installed_and_running(kube)
        assert "treeline-0.0.9" not in kube.helm("list", "-n", SYSTEM)
        assert is_paused(treeline), "the definitions are upgraded too"
        treeline.await_ready("tiny")
        driver.await_served(10)
        assert uids(treeline) == before, "an upgrade of the operator rolls nothing"
        uninstall(kube)
        for crd in CRDS:
            assert kube.get("crd", crd, "default"), "crds.keep is true"
        driver.await_served(10)
        assert uids(treeline) == before, "the pods stay without an operator"
        installed_and_running(kube)
        treeline.change("tiny", rollout={NEW_FIELD: False})
        treeline.await_ready("tiny")
        driver.await_served(10)
        assert uids(treeline) == before
        report = driver.stop()
    assert not report.dropped, str(report)


def test_uninstalling_with_the_definitions_removes_everything(treeline: Installed) -> None:
    """With crds.keep=false the definitions go with the release, and every pool with them."""
    kube = treeline.kube
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    try:
        install(kube, "crds.keep=false")
        uninstall(kube)
        treeline.until(lambda: not any(kube.get("crd", crd, "default") for crd in CRDS), "the CRDs to be gone")
        treeline.until(lambda: not treeline.leftovers(), "everything of the pool to be gone")
        assert not left_in_the_cluster(kube)
    finally:
        installed_and_running(kube)


def test_deleting_a_namespace_removes_everything_in_it(treeline: Installed) -> None:
    treeline.apply(pool("tiny", replicas=1, drain={"timeoutSeconds": 5}))
    treeline.await_ready("tiny")
    kube, namespace = treeline.kube, treeline.namespace
    kube.kubectl("delete", "namespace", namespace, "--wait=false")
    treeline.until(lambda: not kube.pods(namespace), "the pods to be gone")
    # Kubernetes looks for what is left after half the longest grace period of a pod; at a change it looks soon.
    kube.kubectl("annotate", "namespace", namespace, "example.com/look=again")
    treeline.until(lambda: not kube.look(f"/api/v1/namespaces/{namespace}"), "the namespace to be gone")


def left_in_the_cluster(kube: Kube) -> list[str]:
    """List objects that have our name and belong to no pool. (The namespace is the administrator's.)"""
    in_namespace = "deploy,pods,svc,cm,secret,sa,role,rolebinding,pdb,networkpolicy,lease"
    in_cluster = "clusterrole,clusterrolebinding,crd,validatingadmissionpolicy,validatingadmissionpolicybinding"
    found = kube.kubectl("-n", SYSTEM, "get", in_namespace, "-o", "name").split()
    found += kube.kubectl("get", in_cluster, "-o", "name").split()
    return [name for name in found if "treeline" in name]
