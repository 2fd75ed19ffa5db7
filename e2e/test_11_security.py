"""The rights and tokens of pods, access by keys, and logs that contain no prompts."""

from __future__ import annotations

import ast
import base64
from typing import Final

import httpx
import pytest

from e2e.kit.system import SYSTEM, Installed, ask, pool

SECRET_WORDS = "the code word is heliotrope"


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Installed:
    return of_this_file


def test_pods_are_restricted_have_no_tokens_and_log_no_prompts(treeline: Installed) -> None:
    """The namespace enforces Pod Security level restricted: running pods prove that they comply."""
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    url = treeline.url()
    assert ask(url, f"Repeat: {SECRET_WORDS}").status_code == 200
    assert ask(url, SECRET_WORDS, model_name=SECRET_WORDS).status_code == 404
    said = treeline.logs()
    for component in ("runtime", "epp", "edge"):
        for pod in treeline.pods(component):
            assert f"[pod/{pod['metadata']['name']}/" in said
    assert "heliotrope" not in said
    with_token = {
        component
        for component in ("runtime", "epp", "edge")
        for pod in treeline.pods(component)
        for volume in pod["spec"]["volumes"]
        if "serviceAccountToken" in str(volume)
    }
    assert with_token == {"epp"}, "only the picker asks the API server"
    # The warnings for the operator's own pods if their namespace enforced that level too.
    label = ("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    treeline.kube.kubectl("--warnings-as-errors", *label, "--dry-run=server")


_KNOCK: Final = """
import sys, zmq
from treeline_wire.security import CurveKeys

none, other = None, CurveKeys(*zmq.curve_keypair())
answers = {}
for who, keys in (("none", none), ("other", other), ("ours", CurveKeys.load(sys.argv[2]))):
    for port, kind in ((5557, zmq.SUB), (5657, zmq.DEALER), (5757, zmq.SUB)):
        socket = zmq.Context.instance().socket(kind)
        socket.linger = 0
        if kind == zmq.SUB:
            socket.subscribe(b"")
        if keys is not None:
            keys.secure_client(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(f"tcp://{sys.argv[1]}:{port}")
        answers.setdefault(who, []).append(monitor.poll(2000) > 0)
print(answers)
"""
"""Print whether a runtime's sockets (events, replay, load) accept a client: without keys, with other keys, with
ours."""


def test_kv_sockets_refuse_clients_without_keys(treeline: Installed) -> None:
    """The sockets carry prompts."""
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    (runtime,) = treeline.ready_pods("runtime")
    (epp,) = treeline.ready_pods("epp")
    (folder,) = (
        mount["mountPath"] for mount in epp["spec"]["containers"][0]["volumeMounts"] if mount["name"] == "kv-keys"
    )
    said = treeline.inside(epp, "python3", "-c", _KNOCK, runtime["status"]["podIP"], folder, check=True)
    assert ast.literal_eval(said) == {"none": [False] * 3, "other": [False] * 3, "ours": [True] * 3}


@pytest.mark.short
def test_the_edge_requires_api_keys(treeline: Installed) -> None:
    key = "sk-journey-1"
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients"},
        "data": {"me": base64.b64encode(key.encode()).decode()},
    }  # fmt: skip
    treeline.apply(pool("tiny", replicas=1))
    treeline.await_ready("tiny")
    url = treeline.url()
    assert ask(url).status_code == 200
    guarded = {"standalone": {"apiKeysSecretRef": {"name": "clients"}}}
    treeline.apply(secret, pool("tiny", replicas=1, gateway=guarded))
    treeline.await_ready("tiny")  # not before the last Envoy that asks for none has ended
    assert ask(url).status_code == 401
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    answers = [
        httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {given}"}, timeout=30)
        for given in (key, "sk-wrong")
    ]
    assert [answer.status_code for answer in answers] == [200, 401]
