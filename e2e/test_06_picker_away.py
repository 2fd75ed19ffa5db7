"""The picker's pod is deleted under traffic: open, nothing fails; closed, requests are refused as they should be."""

from __future__ import annotations

import time
from pathlib import Path

from e2e.kit.system import Installed, ask, pool
from e2e.kit.traffic import traffic


def replace_picker(treeline: Installed) -> None:
    (old,) = treeline.ready_pods("epp")
    treeline.delete_pod(old)
    treeline.until(
        lambda: [p for p in treeline.ready_pods("epp") if p["metadata"]["uid"] != old["metadata"]["uid"]],
        "another picker",
    )


def test_open_nothing_fails_and_the_tree_is_learnt_anew(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny"))
    treeline.await_ready("tiny")
    url = treeline.url()
    rules = "Answer in one short sentence. " * 60
    prompt = [
        {"role": "system", "content": rules},
        {"role": "user", "content": "What is the capital of Peru?"},
    ]
    home = [ask(url, messages=prompt).headers["x-treeline-endpoint"] for _ in range(3)][-1]
    with traffic(url, kept=kept) as driver:
        replace_picker(treeline)
        back = time.monotonic()
        treeline.until(
            lambda: {ask(url, messages=prompt).headers["x-treeline-endpoint"] for _ in range(4)} == {home},
            "the prompt to go where it is cached",
            15.0,
        )
        learnt = time.monotonic() - back
        driver.await_served(5)
        report = driver.stop()
    assert not report.dropped, str(report)
    assert learnt < 8.0, f"the tree was whole again after {learnt:.1f} s"
    treeline.conclude()


def test_closed_requests_are_refused_with_503_and_no_stream_is_cut(treeline: Installed, kept: Path) -> None:
    treeline.apply(pool("tiny", endpointPicker={"failureMode": "FailClose"}))
    treeline.await_ready("tiny")
    with traffic(treeline.url(), kept=kept) as driver:
        (old,) = treeline.ready_pods("epp")
        treeline.delete_pod(old, now=True)
        treeline.until(lambda: driver.report().of("refused"), "a request to be refused", 30.0)
        treeline.await_ready("tiny")
        driver.await_served(5)
        report = driver.stop()
    assert not report.of("truncated", "failed"), str(report)
    assert {stream.status for stream in report.of("refused")} <= {500, 503}, str(report)
    treeline.conclude()
