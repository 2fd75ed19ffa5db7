"""An empty cluster, `helm install`, `kubectl apply`: an answer, and a status that tells the story, as in the README."""

from __future__ import annotations

import json
import re
import shlex
import socket
import time
from dataclasses import replace
from pathlib import Path

import openai

from e2e.cluster.place import ROOT
from e2e.kit.figures import Figures
from e2e.kit.kube import Kube, condition
from e2e.kit.system import Installed, ask, uninstall

SAMPLE = "manifests/samples/cpu-tiny.yaml"


def quick_start() -> list[str]:
    """The commands of the README's section on Kubernetes. The images of this cluster are under their bare names."""
    section = (ROOT / "README.md").read_text().split("\n## On Kubernetes\n")[1]
    block = section.split("```sh\n")[1].split("```")[0]
    return [re.sub(r" {2,}#.*| --set images\.registry=R", "", line) for line in block.splitlines()]


def to_try() -> list[str]:
    """The commands that the sample suggests."""
    text = (ROOT / SAMPLE).read_text().replace(" \\\n#", "")
    block = text.split("# Try:")[1].split("\n# Again")[0]
    return [line.lstrip("# ") for line in block.splitlines()]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def own_context(kube: Kube, namespace: str, folder: Path) -> Kube:
    """The same cluster for somebody whose context is in a namespace."""
    own = folder / "kubeconfig"
    own.write_bytes(kube.kubeconfig.read_bytes())
    found = replace(kube, kubeconfig=own)
    found.kubectl("config", "set-context", "--current", "--namespace", namespace)
    return found


def test_from_helm_install_to_the_first_answer(kube: Kube, figures: Figures, tmp_path: Path) -> None:
    uninstall(kube)
    kube.kubectl("delete", "namespace", "first", "--ignore-not-found", timeout_s=120)
    kube.kubectl("create", "namespace", "first")
    user = own_context(kube, "first", tmp_path)
    treeline = Installed(kube, "first")
    install, apply, look = quick_start()
    assert apply.endswith(SAMPLE)
    same, wait, forward, curl = to_try()
    assert same == apply

    begun = time.monotonic()
    user.run(*shlex.split(install))
    user.run(*shlex.split(apply))
    with user.started(*shlex.split(look)) as watch:
        user.run(*shlex.split(wait))
        local = f"http://127.0.0.1:{(port := free_port())}"
        with user.started(*shlex.split(forward.removesuffix(" &").replace("8080:", f"{port}:"))) as forwarded:
            treeline.until(lambda: forwarded, "the port to be forwarded")
            answer = json.loads(user.run(*shlex.split(curl.replace("http://localhost:8080", local))))
            figures.add("e2e.install_to_first_token_s", time.monotonic() - begun)
            again = json.loads(user.run(*shlex.split(curl.replace("http://localhost:8080", local))))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    told = [line.text for line in watch]
    assert told[0].split() == ["NAME", "READY", "MODEL", "REPLICAS", "URL", "REASON"]
    assert "Serving" in told[-1]
    treeline.await_ready("tiny")

    found = treeline.pool("tiny")
    assert found["status"]["readyReplicas"] == found["status"]["replicas"] == 2
    assert condition(found, "Ready")["reason"] == "Serving"
    story = user.kubectl("describe", "tlpool", "tiny").partition("Events:")[2]
    assert "ModelLoaded" in story
    assert "Serving" in story
    assert "Warning" not in story

    treeline.change("tiny", gateway={"standalone": {"serviceType": "NodePort", "exposeRouting": True}})
    treeline.await_ready("tiny")
    url = treeline.url()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert {m.id for m in client.models.list()} >= {"tiny"}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    said = client.chat.completions.create(model="tiny-chat", messages=question, max_tokens=24)  # type: ignore[call-overload]
    assert "Paris" in said.choices[0].message.content
    rules = "Answer in one short sentence. " * 40
    served = [ask(url, messages=[{"role": "system", "content": rules}, *question]) for _ in range(6)]
    assert [r.status_code for r in served] == [200] * 6
    homes = {r.headers["x-treeline-endpoint"] for r in served[1:]}
    assert len(homes) == 1, "the same prefix goes to the pod that has it"
    assert int(served[-1].headers["x-treeline-cached-tokens"]) > 100

    treeline.conclude()
    kube.kubectl("delete", "namespace", "first", "--wait=false")
