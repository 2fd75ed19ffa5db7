"""What a pod may, what it carries, who gets in, and what logs say of prompts."""

from __future__ import annotations

import base64

import httpx

from e2e.kit.system import Installed, ask, pool

SECRET_WORDS = "the code word is heliotrope"


def logs(treeline: Installed) -> str:
    """All that the pods of the namespace have said."""
    found = []
    for component in ("runtime", "epp", "edge"):
        for pod in treeline.pods(component):
            name = pod["metadata"]["name"]
            found.append(treeline.kube.kubectl("-n", treeline.namespace, "logs", name, "--all-containers"))
    return "\n".join(found)


def test_restricted_pods_without_tokens_that_log_no_prompt(treeline: Installed) -> None:
    """The namespace enforces Pod Security level restricted: that the pods run shows that they keep to it."""
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    url = treeline.url()
    assert ask(url, f"Repeat: {SECRET_WORDS}").status_code == 200
    assert ask(url, SECRET_WORDS, model_name=SECRET_WORDS).status_code == 404
    said = logs(treeline)
    assert said
    assert "heliotrope" not in said
    with_token = {
        component
        for component in ("runtime", "epp", "edge")
        for pod in treeline.pods(component)
        for volume in pod["spec"]["volumes"]
        if "serviceAccountToken" in str(volume)
    }
    assert with_token == {"epp"}, "only the picker asks the API server"
    treeline.conclude()


def test_kv_sockets_refuse_who_has_no_keys(treeline: Installed) -> None:
    """A subscriber without the key pair hears nothing on the sockets that carry prompts; one with it would."""
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    (runtime,) = treeline.ready_pods("runtime")
    (epp,) = treeline.ready_pods("epp")
    script = (
        "import sys, zmq\n"
        "heard = {}\n"
        "for port in (5557, 5757):\n"
        "    s = zmq.Context.instance().socket(zmq.SUB); s.linger = 0; s.subscribe(b'')\n"
        "    monitor = s.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)\n"
        f"    s.connect('tcp://{runtime['status']['podIP']}:%d' % port)\n"
        "    heard[port] = s.poll(3000) > 0 or monitor.poll(1) > 0\n"
        "print(heard)\n"
    )
    name = epp["metadata"]["name"]
    said = treeline.kube.kubectl("-n", treeline.namespace, "exec", name, "--", "python3", "-c", script)
    assert said.strip() == "{5557: False, 5757: False}"
    treeline.conclude()


def test_api_keys_are_asked_for_at_the_edge(treeline: Installed) -> None:
    key = "sk-journey-1"
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients"},
        "data": {"me": base64.b64encode(key.encode()).decode()},
    }  # fmt: skip
    treeline.apply(
        secret, pool("tiny", replicas=1, gateway={"standalone": {"apiKeysSecretRef": {"name": "clients"}}})
    )
    treeline.await_ready("tiny")
    url = treeline.url()
    assert ask(url).status_code == 401
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    answers = [
        httpx.post(
            f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {given}"}, timeout=30
        )
        for given in (key, "sk-wrong")
    ]
    assert [answer.status_code for answer in answers] == [200, 401]
    treeline.conclude()
