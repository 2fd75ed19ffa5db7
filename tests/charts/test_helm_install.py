"""Helm installs, upgrades and uninstalls on a real API server, and leaves only what the docs say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import helm
from support.control_plane import ControlPlane, control_plane_or_skip
from support.stack import until

pytestmark = pytest.mark.deep

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOLS = "/apis/treeline.dev/v1alpha1/namespaces/default/inferencepools"
COLLECTIONS = (
    "/apis/apps/v1/deployments",
    "/apis/policy/v1/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/networkpolicies",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
)
OURS = "labelSelector=app.kubernetes.io/part-of%3Dtreeline"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An empty control plane of the test's own: CRDs are deleted here."""
    own = control_plane_or_skip(controllers=(), audit=False)
    own.start()
    yield own
    own.stop()


def test_install_upgrade_and_uninstall(plane):
    run = on(plane)
    run("install", "--create-namespace")
    assert crds(plane) == ["inferencemodels.treeline.dev", "inferencepools.treeline.dev"]
    pool = {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "tiny"}}
    pool["spec"] = {"model": {"uri": "builtin://tiny"}}
    until(lambda: served(plane, POOLS), "the pools' kind to be served")
    plane.request("POST", POOLS, pool)

    run("upgrade", "--set", "operator.replicas=1")
    (deployment,) = plane.request("GET", f"/apis/apps/v1/deployments?{OURS}")["items"]
    assert deployment["spec"]["replicas"] == 1
    assert plane.request("GET", f"/apis/policy/v1/poddisruptionbudgets?{OURS}")["items"] == []

    run("uninstall")
    assert left(plane) == []
    assert len(crds(plane)) == 2, "they are kept"
    assert [item["metadata"]["name"] for item in plane.request("GET", POOLS)["items"]] == ["tiny"]

    run("install", "--set", "crds.keep=false")
    assert [item["metadata"]["name"] for item in plane.request("GET", POOLS)["items"]] == ["tiny"]
    run("uninstall")
    assert left(plane) == []
    until(lambda: crds(plane) == [], "the CRDs to go")


def on(plane: ControlPlane) -> Callable[..., None]:
    """Return a function that runs helm on the control plane."""

    def run(word: str, *options: str) -> None:
        chart = [] if word == "uninstall" else [str(helm.CHART)]
        where = ["--kubeconfig", str(plane.admin), "--namespace", "treeline-system"]
        done = helm.run(word, "treeline", *chart, *where, *options)
        assert done.returncode == 0, done.stderr

    return run


def served(plane: ControlPlane, path: str) -> bool:
    with plane.http() as client:
        return client.get(path).status_code == 200


def crds(plane: ControlPlane) -> list[str]:
    items = plane.request("GET", CRDS)["items"]
    return sorted(item["metadata"]["name"] for item in items if item["spec"]["group"] == "treeline.dev")


def left(plane: ControlPlane) -> list[tuple[str, str]]:
    """List the chart's objects that still exist, without CRDs."""
    return [
        (path, item["metadata"]["name"])
        for path in COLLECTIONS
        for item in plane.request("GET", f"{path}?{OURS}")["items"]
    ]
