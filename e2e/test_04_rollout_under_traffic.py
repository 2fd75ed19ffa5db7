"""A new template under traffic: rolled out, reverted half-way, paused, and one whose image does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.kit.kube import condition
from e2e.kit.system import Installed, pool
from e2e.kit.traffic import traffic


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def revisions(treeline: Installed) -> dict[str, int]:
    """Return the ready pods of each revision."""
    found: dict[str, int] = {}
    for pod in treeline.ready_pods("runtime"):
        revision = pod["metadata"]["labels"]["treeline.dev/revision"]
        found[revision] = found.get(revision, 0) + 1
    return found


def annotated(value: str | None) -> dict[str, Any]:
    """Return a template with the annotation; None removes it."""
    return {"metadata": {"annotations": {"example.com/build": value}}}


def build(treeline: Installed) -> str | None:
    """Return the annotation's current value."""
    template = treeline.pool("tiny")["spec"].get("template") or {}
    found: str | None = template.get("metadata", {}).get("annotations", {}).get("example.com/build")
    return found


@pytest.mark.short
def test_a_new_template_replaces_the_old_one(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    (old,) = revisions(treeline)
    with traffic(treeline.url(), kept=kept) as driver:
        treeline.change("tiny", template=annotated("two"))
        treeline.until(lambda: old not in revisions(treeline), "the old revision to be gone")
        treeline.await_ready("tiny")
        driver.await_served(5)
        report = driver.stop()
    assert not report.dropped, str(report)
    assert list(revisions(treeline).values()) == [2]


def test_a_rollout_is_reverted_half_way(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    (old,), before = revisions(treeline), build(treeline)
    with traffic(treeline.url(), kept=kept) as driver:
        treeline.change("tiny", template=annotated("three"))
        treeline.until(lambda: len(revisions(treeline)) == 2, "a pod of the new revision to be ready")
        treeline.change("tiny", template=annotated(before))
        treeline.until(lambda: revisions(treeline) == {old: 2}, "the old revision to be whole again")
        treeline.await_ready("tiny")
        driver.await_served(5)
        report = driver.stop()
    assert not report.dropped, str(report)


def test_a_rollout_is_paused_and_meets_a_missing_image(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    (old,), before = revisions(treeline), build(treeline)
    with traffic(treeline.url(), kept=kept) as driver:
        treeline.change("tiny", rollout={"paused": True}, template=annotated("four"))
        treeline.until(lambda: condition(treeline.pool("tiny"), "Progressing").get("reason") == "Paused", "the pause")
        assert revisions(treeline) == {old: 2}
        treeline.change("tiny", rollout={"paused": False}, engine={"image": "example.invalid/none:1"})
        found = treeline.until(
            lambda: [
                one
                for one in treeline.pool("tiny")["status"]["conditions"]
                if one["reason"] == "ImagePullFailing" and "example.invalid/none:1" in one["message"]
            ],
            "the status to say which image cannot be pulled",
        )
        assert found
        assert revisions(treeline) == {old: 2}, "the old revision serves on"
        told = condition(treeline.pool("tiny"), "Ready")
        assert (told["status"], told["reason"]) == ("True", "ImagePullFailing"), "it serves, and needs somebody"
        driver.await_served(5)
        treeline.change("tiny", engine={"image": None}, template=annotated(before))
        treeline.await_ready("tiny")
        report = driver.stop()
    assert not report.dropped, str(report)
    assert revisions(treeline) == {old: 2}
