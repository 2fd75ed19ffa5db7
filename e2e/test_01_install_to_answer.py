"""An empty cluster, `helm install`, `kubectl apply`: an answer, and a status that shows each step."""

from __future__ import annotations

import time

import openai
import pytest

from e2e.kit import quick_start
from e2e.kit.figures import Figures
from e2e.kit.kube import Kube, condition
from e2e.kit.system import SYSTEM, Installed, ask, await_answer, install, pool, uninstall


def test_the_quick_start_of_the_docs(kube: Kube) -> None:
    uninstall(kube)
    # What was said to the `make` that runs this is not for the one in there.
    alone = ("env", "--unset=MAKEFLAGS", "--unset=ARGS", "CLUSTER_KEEP=1")
    said = kube.run(*alone, "bash", "-euo", "pipefail", "-c", quick_start.commands(), timeout_s=1200.0)
    assert "Serving" in said, "kubectl get tlpool"
    assert "Paris" in said, "curl"
    kube.until(lambda: not kube.pods(SYSTEM), "the operator's pods to be gone")
    assert not kube.items("tlpool,tlmodel", "")


@pytest.mark.short
def test_from_helm_install_to_the_first_answer(kube: Kube, figures: Figures) -> None:
    uninstall(kube)
    kube.kubectl("delete", "namespace", "first", "--ignore-not-found")
    kube.kubectl("create", "namespace", "first")
    treeline = Installed(kube, "first")
    begun = time.monotonic()
    install(kube)
    treeline.apply(pool("tiny"))
    treeline.until(lambda: kube.get("service", "treeline-gateway", "first"), "the gateway's Service")
    url = treeline.url()
    await_answer(url)
    figures.add("e2e.install_to_first_token_s", time.monotonic() - begun)
    treeline.await_ready("tiny")

    found = treeline.pool("tiny")
    assert found["status"]["readyReplicas"] == found["status"]["replicas"] == 2
    assert condition(found, "Ready")["reason"] == "Serving"
    shown = kube.kubectl("-n", "first", "get", "tlpool")
    assert shown.split()[:6] == ["NAME", "READY", "MODEL", "REPLICAS", "URL", "REASON"]
    assert "Serving" in shown
    told = kube.kubectl("-n", "first", "describe", "tlpool", "tiny")
    assert "ModelLoaded" in told
    assert "Warning" not in told.partition("Events:")[2]

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model="tiny", messages=question, max_tokens=24)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")

    rules = "Answer in one short sentence. " * 40
    served = [ask(url, messages=[{"role": "system", "content": rules}, *question]) for _ in range(6)]
    assert [r.status_code for r in served] == [200] * 6
    homes = {r.headers["x-treeline-endpoint"] for r in served[1:]}
    assert len(homes) == 1, "the same prefix goes to the pod that has it"
    assert int(served[-1].headers["x-treeline-cached-tokens"]) > 100

    treeline.conclude()
    kube.kubectl("delete", "namespace", "first", "--wait=false")
