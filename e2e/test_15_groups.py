"""A model over two pods answers as on one. When a worker dies its group comes back, and other replicas lose no stream.

LeaderWorkerSet is installed on the `local` provider, if it is built (`scripts/control_plane.sh leader-worker-set`);
another cluster must have it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from treeline_bench.control_plane import Missing, programs
from treeline_wire.labels import GROUP_INDEX, WORKER_INDEX

from e2e.cluster.local import Local
from e2e.kit import groups
from e2e.kit.faults import kill_runtime
from e2e.kit.kube import Kube
from e2e.kit.system import Installed, ask, pool
from e2e.kit.traffic import Mix, traffic

GROUP_SETS = "leaderworkersets.leaderworkerset.x-k8s.io"
OVER_TWO: dict[str, Any] = {
    "accelerator": {"nodes": 2},
    "engine": {
        "tensorParallel": 2,
        "threads": 1,
        "resources": {"requests": {"cpu": "50m", "memory": "400Mi"}, "limits": {"memory": "2Gi"}},
    },
}
QUESTIONS = ("What is the capital of France?", "Count to ten.", "Tell me about the sea, in one sentence.")


@pytest.fixture(scope="module", autouse=True)
def _groups(installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    local = Local()
    if local.status()["kubeconfig"] != str(installed.kubeconfig):
        if GROUP_SETS not in installed.kubectl("get", "crd", "-o", "name"):
            pytest.skip("the cluster has no LeaderWorkerSet")
        yield
        return
    try:
        built = programs(groups.PROGRAM)[groups.PROGRAM]
    except Missing as missing:
        pytest.skip(str(missing))
    local.send_programs({groups.IMAGE: built / groups.PROGRAM})
    found = groups.Groups(installed, built, tmp_path_factory.mktemp("groups"))
    found.install()
    yield
    found.remove()


def by_place(treeline: Installed) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the pods of the pool `two` that are not being deleted, by group and place in it."""
    found = {}
    for pod in treeline.pods("runtime", "two"):
        labels = pod["metadata"]["labels"]
        if "deletionTimestamp" not in pod["metadata"]:
            found[labels[GROUP_INDEX], labels[WORKER_INDEX]] = pod
    return found


def answers(url: str, model_name: str) -> list[str]:
    return [
        str(ask(url, question, model_name, temperature=0).json()["choices"][0]["message"]["content"])
        for question in QUESTIONS
    ]


@pytest.mark.chaos
def test_two_pods_answer_as_one_and_come_back_together(treeline: Installed, kept: Path) -> None:
    one, two = ({"uri": "builtin://tiny", "name": name} for name in ("one", "two"))
    treeline.apply(pool("one", replicas=1, model=one), pool("two", replicas=2, model=two, **OVER_TWO))
    treeline.await_ready("one", "two")
    url = treeline.url()
    assert answers(url, "two") == answers(url, "one")

    before = by_place(treeline)
    assert set(before) == {(group, place) for group in "01" for place in "01"}
    victim = str(before["0", "0"]["status"]["podIP"])
    with traffic(url, Mix(models=("two",)), kept=kept) as driver:
        driver.await_served(10)
        kill_runtime(treeline.kube, before["0", "1"])
        killed = time.monotonic()

        def recreated() -> bool:
            now = {key: pod["metadata"]["uid"] for key, pod in by_place(treeline).items()}
            return len(now) == 4 and all(now["0", place] != before["0", place]["metadata"]["uid"] for place in "01")

        treeline.until(recreated, "the whole group to be made again")
        treeline.await_ready("two")
        back = time.monotonic()
        treeline.until(lambda: len(driver.report().since(back).hosts()) == 2, "both groups to serve")
        report = driver.stop()
    for stream in report.dropped:
        assert stream.host in ("", victim), str(report)
    assert len(report.dropped) <= 2 * driver.mix.workers, str(report)
    assert report.since(killed).of("served"), "the other group went on"
    assert by_place(treeline)["1", "0"]["metadata"]["uid"] == before["1", "0"]["metadata"]["uid"]
    assert answers(url, "two") == answers(url, "one")


def test_groups_scale_down_without_a_dropped_stream(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("two", replicas=2, model={"uri": "builtin://tiny", "name": "two"}, **OVER_TWO))
    treeline.await_ready("two")
    with traffic(treeline.url(), Mix(models=("two",)), kept=kept) as driver:
        driver.await_served(10)
        treeline.change("two", replicas=1)
        treeline.until(lambda: set(by_place(treeline)) == {("0", "0"), ("0", "1")}, "group 1 to be gone")
        treeline.await_ready("two")
        driver.await_served(10)
        report = driver.stop()
    assert not report.dropped, str(report)
