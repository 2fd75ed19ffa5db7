"""Two pools behind one URL: names, weights that change under traffic, a conflict, an unknown name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from e2e.kit.kube import condition
from e2e.kit.system import Installed, ask, model, pool
from e2e.kit.traffic import Mix, traffic


def answered_by(url: str, name: str, count: int) -> Counter[str]:
    """Count the models that answer ``count`` requests for a name."""
    found: Counter[str] = Counter()
    for number in range(count):
        answer = ask(url, f"Spell the word {number}.", name)
        assert answer.status_code == 200, answer.text
        found[answer.json()["model"]] += 1
    return found


def test_names_weights_and_conflicts_behind_one_url(treeline: Installed, kept: Path) -> None:
    small = {"replicas": 1}
    treeline.apply(
        pool("red", **small, model={"uri": "builtin://tiny", "name": "red"}),
        pool("blue", **small, model={"uri": "builtin://tiny", "name": "blue"}),
        model(
            "chat",
            "chat",
            "red",
            targetModels=[{"name": "red", "weight": 90}, {"name": "blue", "weight": 10}],
        ),
        model("chat-again", "chat", "blue"),
    )
    treeline.await_ready("red", "blue")
    url = treeline.url()
    assert ask(url, model_name="red").json()["model"] == "red"
    assert ask(url, model_name="blue").json()["model"] == "blue"
    unknown = ask(url, model_name="green")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"

    def reason(name: str) -> str:
        found = treeline.kube.get("tlmodel", name, treeline.namespace)
        return str(condition(found, "Accepted").get("reason"))

    treeline.until(lambda: reason("chat") == "Accepted", "the older model to be accepted")
    treeline.until(lambda: reason("chat-again") == "ModelNameInUse", "the conflict to be told")

    with traffic(url, Mix(models=("chat",), workers=3), kept) as driver:
        before = answered_by(url, "chat", 60)
        treeline.kube.patch(
            "tlmodel", "chat", treeline.namespace,
            {"spec": {"targetModels": [{"name": "red", "weight": 50}, {"name": "blue", "weight": 50}]}},
        )  # fmt: skip
        driver.await_served(5)
        after = answered_by(url, "chat", 60)
        report = driver.stop()
    assert not report.dropped, str(report)
    assert before["red"] >= 45, before
    assert 15 <= after["red"] <= 45, after

    treeline.kube.kubectl("-n", treeline.namespace, "delete", "tlmodel", "chat")
    treeline.until(lambda: reason("chat-again") == "Accepted", "the next oldest to be promoted")
    treeline.until(lambda: answered_by(url, "chat", 3) == {"blue": 3}, "the promoted one to answer")
