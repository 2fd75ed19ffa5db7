"""An InferenceModel brings its adapter to running pods: it answers by name, comes back after a kill, is replaced by
another without a lost request, shares a name with the model by weights, and goes with the InferenceModel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from treeline_wire import ports
from treeline_wire.labels import ADAPTERS

from e2e.kit.faults import kill_runtime
from e2e.kit.hub import MIRROR, hub
from e2e.kit.kube import condition
from e2e.kit.system import API, Installed, ask, model, pool
from e2e.test_07_runtime_dies import ended, restarts

SQL, POET = "hf://org/sql", "hf://org/poet"
QUESTION = "Tell me about the capital of France."


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    template = {"spec": {"initContainers": [{"name": "adapters", "env": [MIRROR]}]}}
    of_this_file.apply(*hub("sql", "poet"), pool("tiny", engine={"lora": {"slots": 2}}, template=template))
    of_this_file.await_ready("tiny")
    return of_this_file


def adapted(treeline: Installed) -> dict[str, Any]:
    found = treeline.kube.look(f"/apis/{API}/namespaces/{treeline.namespace}/inferencemodels/sql")
    assert found is not None
    return found


def loaded(treeline: Installed, pod: dict[str, Any]) -> list[str]:
    """Return the adapters that a pod's engine lists."""
    listed = treeline.page(pod, f"http://127.0.0.1:{ports.RUNTIME_HTTP}/v1/models")["data"]
    return [one["id"] for one in listed if one.get("parent")]


def await_loaded(treeline: Installed) -> str:
    """Wait until both pods have the newest version and serve it, and no other; return its name in the engines."""

    def all_have() -> str:
        found = adapted(treeline)
        told, state = found.get("status", {}).get("adapter", {}), condition(found, "AdapterLoaded")
        good = state.get("status") == "True" and state["observedGeneration"] == found["metadata"]["generation"]
        pods = treeline.ready_pods("runtime") if good else []
        name: str = told.get("name", "")
        return name if len(pods) == 2 and all(loaded(treeline, pod) == [name] for pod in pods) else ""

    name: str = treeline.until(all_have, "the adapter to be on both pods")
    return name


def text(treeline: Installed, name: str) -> str:
    answer = ask(treeline.url(), QUESTION, name, temperature=0)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["message"]["content"]
    return said


@contextmanager
def asked_all_the_time(say: Callable[[], str]) -> Iterator[set[str]]:
    """Ask again and again during a block; yields the texts. An answer that is none fails the journey."""
    texts, over, wrong = set[str](), threading.Event(), list[BaseException]()

    def run() -> None:
        while not over.is_set():
            try:
                texts.add(say())
            except BaseException as failure:
                wrong.append(failure)
                return

    thread = threading.Thread(target=run, name="asks")
    thread.start()
    try:
        yield texts
    finally:
        over.set()
        thread.join()
    assert not wrong, wrong


def test_an_adapter_comes_to_running_pods_answers_by_name_and_survives_what_pods_do_not(treeline: Installed) -> None:
    before = treeline.ready_pods("runtime")
    treeline.apply(model("sql", "sql", "tiny", adapter={"uri": SQL}))
    version = await_loaded(treeline)
    after = treeline.ready_pods("runtime")
    assert [(p["metadata"]["uid"], restarts(p)) for p in after] == [(p["metadata"]["uid"], restarts(p)) for p in before]
    sql = text(treeline, "sql")
    assert sql != text(treeline, "tiny")
    assert sql == text(treeline, "tiny:sql")

    kill_runtime(treeline.kube, after[0])
    treeline.until(lambda: ended(treeline, after[0]), "the container to end")
    assert await_loaded(treeline) == version
    treeline.delete_pod(after[1])
    gone = after[1]["metadata"]["name"]
    treeline.until(lambda: gone not in {p["metadata"]["name"] for p in treeline.pods("runtime")}, "the pod to be gone")
    assert await_loaded(treeline) == version
    assert text(treeline, "sql") == sql


def test_another_source_takes_over_without_a_lost_request_and_wrong_files_do_not(treeline: Installed) -> None:
    old, sql = await_loaded(treeline), text(treeline, "sql")
    with asked_all_the_time(lambda: text(treeline, "sql")) as texts:
        treeline.kube.patch("tlmodel", "sql", treeline.namespace, {"spec": {"adapter": {"uri": POET}}})
        new = await_loaded(treeline)
        poet = text(treeline, "sql")
        treeline.kube.patch("tlmodel", "sql", treeline.namespace, {"spec": {"adapter": {"digest": "0" * 16}}})
        failing = treeline.until(lambda: _failing(treeline), "the digest to be refused")
    assert new != old
    assert texts == {sql, poet}
    assert sql != poet
    assert "loaded on 0 of 2 pods" in failing
    assert "is wanted" in failing
    assert adapted(treeline)["status"]["adapter"]["name"] == new, "what served goes on"
    treeline.kube.patch("tlmodel", "sql", treeline.namespace, {"spec": {"adapter": {"digest": None}}})
    assert await_loaded(treeline) == new


def _failing(treeline: Installed) -> str:
    state = condition(adapted(treeline), "AdapterLoaded")
    return str(state["message"]) if state.get("reason") == "AdapterFailing" else ""


def test_weights_share_a_name_and_a_deleted_model_takes_its_adapter_along(treeline: Installed) -> None:
    await_loaded(treeline)
    targets = [{"name": "sql", "weight": 1}, {"name": "tiny", "weight": 1}]
    treeline.apply(model("canary", "canary", "tiny", targetModels=targets))
    both = {text(treeline, "sql"), text(treeline, "tiny")}
    seen = set[str]()

    def all_seen() -> bool:
        answer = ask(treeline.url(), QUESTION, "canary", temperature=0)
        if answer.status_code == 200:
            seen.add(answer.json()["choices"][0]["message"]["content"])
        return seen >= both

    treeline.until(all_seen, "both targets to answer")
    assert seen == both

    treeline.kube.kubectl("-n", treeline.namespace, "delete", "tlmodel", "canary", "sql")
    treeline.until(lambda: not any(loaded(treeline, p) for p in treeline.ready_pods("runtime")), "it to be unloaded")
    assert ask(treeline.url(), QUESTION, "sql").status_code == 404
    assert {pod["metadata"]["annotations"][ADAPTERS] for pod in treeline.pods("runtime")} == {"[]"}
