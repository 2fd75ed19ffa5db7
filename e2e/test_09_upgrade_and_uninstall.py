"""The operator is upgraded, uninstalled and installed again under traffic; what is left at the end is nothing."""

from __future__ import annotations

from pathlib import Path

from e2e.kit.system import SYSTEM, Installed, install, pool
from e2e.kit.traffic import traffic

CRDS = ("inferencepools.treeline.dev", "inferencemodels.treeline.dev")


def uids(treeline: Installed) -> set[str]:
    return {p["metadata"]["uid"] for part in ("runtime", "epp", "edge") for p in treeline.pods(part)}


def test_pods_do_not_notice(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    before = uids(treeline)
    kube = treeline.kube
    with traffic(treeline.url(), kept=kept) as driver:
        install(kube, "operator.logLevel=debug")
        kube.kubectl(
            "-n", SYSTEM, "rollout", "status", "deployment/treeline-operator", "--timeout=120s", timeout_s=130
        )
        driver.await_served(10)
        assert uids(treeline) == before, "an upgrade of the operator rolls nothing"
        kube.helm("uninstall", "treeline", "-n", SYSTEM, "--wait")
        for crd in CRDS:
            assert kube.get("crd", crd, "default"), "crds.keep is true"
        driver.await_served(10)
        assert uids(treeline) == before, "the pods stay without an operator"
        install(kube)
        kube.kubectl(
            "-n", SYSTEM, "rollout", "status", "deployment/treeline-operator", "--timeout=120s", timeout_s=130
        )
        treeline.await_ready("tiny")
        assert uids(treeline) == before
        report = driver.stop()
    assert not report.dropped, str(report)
    treeline.conclude()


def test_a_namespace_that_goes_takes_all_with_it(treeline: Installed) -> None:
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    kube = treeline.kube
    kube.kubectl("delete", "namespace", treeline.namespace, "--wait=false")
    kube.until(
        lambda: not kube.kubectl("get", "namespace", treeline.namespace, "--ignore-not-found", "-o", "name"),
        "the namespace to be gone", 120.0, treeline.namespace,
    )  # fmt: skip
    kube.kubectl("create", "namespace", treeline.namespace)  # the fixture deletes it


def test_uninstalled_with_everything(treeline: Installed) -> None:
    """crds.keep=false: the definitions go with the release, and every pool with them."""
    kube = treeline.kube
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    try:
        install(kube, "crds.keep=false")
        kube.helm("uninstall", "treeline", "-n", SYSTEM, "--wait")
        treeline.until(
            lambda: not any(kube.get("crd", crd, "default") for crd in CRDS), "the CRDs to be gone", 120.0
        )
        treeline.until(lambda: not treeline.leftovers(), "everything of the pool to be gone", 120.0)
        system = kube.kubectl(
            "-n", SYSTEM, "get", "deploy,svc,sa,role,rolebinding,pdb,networkpolicy", "-o", "name"
        )
        assert "treeline" not in system, system
        for kind in ("clusterrole", "clusterrolebinding", "validatingadmissionpolicy"):
            assert "treeline" not in kube.kubectl("get", kind, "-o", "name"), kind
    finally:
        install(kube)
        kube.kubectl(
            "-n", SYSTEM, "rollout", "status", "deployment/treeline-operator", "--timeout=120s", timeout_s=130
        )
