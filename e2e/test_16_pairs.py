"""Prompts are computed on two pods and answered by two others. One of each is killed, then all are replaced, and no
answer is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from treeline_wire import ports
from treeline_wire.labels import ROLE

from e2e.kit.answers import code_word, count_to
from e2e.kit.faults import kill_runtime_at_work
from e2e.kit.system import Installed, ask, pool
from e2e.kit.traffic import Mix, Report, traffic
from e2e.test_07_runtime_dies import ended, ip

PAIRS: Final[dict[str, Any]] = {"prefill": {"replicas": 2}, "engine": {"hostCache": "128Mi"}}
KNOWN: Final = {"short": [code_word(seed) for seed in range(8)], "long": [count_to(end) for end in range(50, 60, 2)]}
# Prompts go apart where answers run that they would delay.
MIX: Final = Mix(workers=8, long_share=0.5, new_share=0.8, known=KNOWN)


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    of_this_file.apply(pool("tiny", **PAIRS))
    of_this_file.await_ready("tiny")
    return of_this_file


def side(treeline: Installed, role: str) -> list[dict[str, Any]]:
    """Return the ready pods of one side."""
    return [pod for pod in treeline.ready_pods("runtime") if pod["metadata"]["labels"][ROLE] == role]


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def travelled(treeline: Installed, pod: dict[str, Any]) -> int:
    """Return the tokens whose pages a runtime has given to others or got from them, since its start."""
    (state,) = treeline.page(pod, f"http://127.0.0.1:{ports.RUNTIME_HTTP}/server_info")["internal_states"]
    given: int = state["tiers"]["total_sent_tokens"]
    got: int = state["tiers"]["total_loaded_tokens"].get("PEER", 0)
    return got if pod["metadata"]["labels"][ROLE] == "decode" else given


def await_pages(treeline: Installed, *roles: str) -> None:
    """Wait until pages have travelled from, or to, every pod of these sides."""

    def all_have() -> bool:
        pods = [pod for role in roles for pod in side(treeline, role)]
        return len(pods) == 2 * len(roles) and all(travelled(treeline, pod) for pod in pods)

    treeline.until(all_have, f"pages to travel: {', '.join(roles)}")


def await_back(treeline: Installed, killed: dict[str, Any]) -> None:
    """Wait until a killed runtime has ended and is ready again."""
    treeline.until(lambda: ended(treeline, killed), "the container to end")
    treeline.until(lambda: names(treeline.ready_pods("runtime")) & names([killed]), "it to be ready again")


def no_answer_is_wrong(report: Report) -> None:
    wrong = [(stream.text, stream.answer) for stream in report.streams if stream.wrong]
    assert not wrong, wrong[:3]


@pytest.mark.chaos
def test_a_killed_pod_of_either_side_makes_no_answer_wrong(treeline: Installed, kept: Path) -> None:
    url = treeline.url()
    for one in (*KNOWN["short"], *KNOWN["long"]):
        answer = ask(url, messages=one.messages, max_tokens=MIX.long_tokens, temperature=0).json()
        assert answer["choices"][0]["message"]["content"] == one.answer, "undisturbed"
    with traffic(url, MIX, kept) as driver:
        await_pages(treeline, "prefill", "decode")

        prompts = side(treeline, "prefill")[0]
        kill_runtime_at_work(treeline.kube, prompts)
        await_back(treeline, prompts)
        await_pages(treeline, "prefill")
        assert not driver.report().dropped, "a killed prefill pod costs time alone"

        answers = side(treeline, "decode")[0]
        kill_runtime_at_work(treeline.kube, answers)
        await_back(treeline, answers)
        await_pages(treeline, "decode")
        report = driver.stop()
    counted = treeline.picker_metrics()
    assert counted['treeline_epp_forms_total{form="apart"}'] > 0, counted
    assert counted['treeline_epp_prefills_total{outcome="error"}'] > 0, "prompts were under way when it was killed"
    no_answer_is_wrong(report)
    for stream in report.dropped:
        assert stream.host in ("", ip(answers)), str(report)
    assert len(report.dropped) <= 2 * driver.mix.workers, str(report)


def test_pods_of_both_sides_are_replaced_and_one_leaves_without_a_wrong_or_lost_answer(
    treeline: Installed, kept: Path
) -> None:
    before = names(treeline.pods("runtime"))
    with traffic(treeline.url(), replace(MIX, seed=8), kept) as driver:
        treeline.change("tiny", template={"metadata": {"annotations": {"example.com/build": "two"}}})
        treeline.until(lambda: not before & names(treeline.pods("runtime")), "the old pods to be gone")
        treeline.await_ready("tiny")
        await_pages(treeline, "prefill", "decode")
        treeline.change("tiny", prefill={"replicas": 1})
        treeline.until(lambda: len(treeline.pods("runtime")) == 3, "a prefill pod to be gone")
        driver.await_served(5)
        report = driver.stop()
    no_answer_is_wrong(report)
    assert not report.dropped, str(report)
