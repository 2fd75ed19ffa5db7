"""Sleep, new weights, profiles by HTTP: effects on running and waiting requests, refusals, reports to routers (real
engine)."""

from __future__ import annotations

import base64
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from support.runtime_server import ServerProcess, Stream, eventually, make_checkpoint, running
from treeline_wire import frames
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad, decode_load

pytestmark = [pytest.mark.integration, pytest.mark.deep]

FLAGS = ("--enable-debug-endpoints", "--enable-return-hidden-states", "--max-bytes-in-flight=67108864")
BODY = {"prompt": "hello world, how are you?", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def profiles() -> Iterator[Path]:
    """The server's TMPDIR. Its sockets are there, too: a path of pytest's would be too long for them."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def server(model: Path, profiles: Path) -> Iterator[ServerProcess]:
    with running(model, "--max-total-tokens=4096", *FLAGS, environment={"TMPDIR": str(profiles)}) as server:
        yield server


def text(http: httpx.Client) -> str:
    answer = http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def told(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def loads(server: ServerProcess, http: httpx.Client) -> Iterator[TreelineLoad]:
    """Yield the load reports that a picker receives."""
    with zmq.Context() as context, context.socket(zmq.SUB) as reports:
        port = http.get("/server_info").json()["kv_events"]["load_endpoint_port_base"]
        reports.connect(f"tcp://127.0.0.1:{port}")
        reports.subscribe(TREELINE_LOAD_TOPIC)
        while reports.poll(60_000):
            report = decode_load(TREELINE_LOAD_TOPIC, frames.parse_live(reports.recv_multipart())[2])
            assert isinstance(report, TreelineLoad)
            yield report


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_server_refuses_and_routers_know(
    server: ServerProcess, http: httpx.Client, admin: httpx.Client, level: int
) -> None:
    before = text(http)
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert admin.post(f"/sleep?level={level}").json() == {"asleep": level}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = http.post("/v1/completions", json=BODY)
    assert told(refused, 503) == "The engine is asleep"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-treeline-overloaded"] == "true"
    for path in ("/ready", "/health", "/health_generate"):
        assert told(http.get(path), 503) == "The engine is asleep"
    assert http.get("/live").status_code == 200
    assert next(loads(server, http)).draining
    info = http.get("/server_info").json()
    assert (info["status"], info["asleep"]) == ("asleep", level)
    assert http.get("/v1/loads").json()["loads"][0]["asleep"] == level
    assert admin.get("/debug/radix").json()["blocks"] == []
    assert told(admin.post("/sleep"), 400) == f"Refused: it is already asleep, at level {level}"
    same = {"model_path": info["model_path"]}
    assert admin.post("/update_weights", json=same).status_code == 200
    assert http.get("/server_info").json()["asleep"] == 2, "the weights on the host were the old ones"
    assert http.get("/v1/loads").json()["loads"][0]["asleep"] == 2
    assert admin.post("/wake_up").json() == {"asleep": 0}
    assert told(admin.post("/wake_up"), 400) == "Refused: it is awake"
    assert http.get("/ready").status_code == 200
    assert text(http) == before
    assert not next(report for report in loads(server, http) if not report.draining).draining


def test_sleep_ends_requests_or_waits_for_them(server: ServerProcess, http: httpx.Client, admin: httpx.Client) -> None:
    stream = Stream(server, 900, prompt="one", ignore_eos=True).underway()
    assert admin.post("/sleep?mode=abort").status_code == 200
    assert len(stream.ended()) < 900
    assert admin.post("/wake_up").status_code == 200
    stream = Stream(server, 300, prompt="one", ignore_eos=True).underway()
    answers: list[httpx.Response] = []
    sleeper = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.admin_url}/sleep?mode=wait", timeout=60))
    )
    sleeper.start()
    eventually(lambda: http.get("/server_info").json()["operation"] == "going to sleep", 60, "it waits")
    assert told(http.post("/v1/completions", json=BODY), 503) == "The engine is going to sleep"
    assert told(admin.post("/wake_up"), 409) == "Another operation is running: going to sleep"
    assert stream.ended()[-1] == "[DONE]"
    sleeper.join(30)
    assert answers[0].json() == {"asleep": 1}
    assert admin.post("/wake_up").status_code == 200
    assert text(http)


def test_a_cancelled_operation_that_had_not_begun_changes_nothing(server: ServerProcess, http: httpx.Client) -> None:
    stream = Stream(server, 900, prompt="two", ignore_eos=True).underway()
    host, port = server.admin_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(b"POST /sleep?mode=wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        eventually(lambda: http.get("/server_info").json()["operation"] == "going to sleep", 60, "it waits")
    eventually(lambda: http.get("/server_info").json()["operation"] is None, 60, "it is given up")
    assert http.get("/ready").status_code == 200
    assert stream.is_alive(), "or it need not have waited"
    assert stream.ended()[-1] == "[DONE]"
    assert text(http)


def test_new_weights_are_waited_for(
    server: ServerProcess, http: httpx.Client, admin: httpx.Client, tmp_path: Path, model: Path
) -> None:
    old = text(http)
    new = make_checkpoint(tmp_path / "new", seed=5)
    stream = Stream(server, 200, prompt="three", ignore_eos=True).underway()
    updates: list[httpx.Response] = []
    held: list[str] = []
    body = {"model_path": str(new), "weight_version": "step-7"}

    def update() -> None:
        updates.append(httpx.post(f"{server.admin_url}/update_weights", json=body, timeout=60))

    updater = threading.Thread(target=update)
    updater.start()
    eventually(lambda: http.get("/server_info").json()["operation"] is not None or updates, 60, "it has begun")
    waiting = threading.Thread(target=lambda: held.append(text(http)))
    waiting.start()
    assert stream.ended()[-1] == "[DONE]", "what ran has ended by itself"
    updater.join(60)
    waiting.join(60)
    assert updates[0].json()["success"] is True
    assert updates[0].json()["weight_version"] == "step-7"
    fresh = text(http)
    assert fresh != old
    assert held == [fresh], "who came meanwhile is answered by the new weights"
    info = http.get("/server_info").json()
    assert (info["weight_version"], info["model_path"]) == ("step-7", str(new))
    meta = http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}).json()["meta_info"]
    assert meta["weight_version"] == "step-7"
    refused = admin.post("/update_weights", json={"model_path": str(tmp_path)})
    assert "config.json" in told(refused, 400)
    assert (text(http), http.get("/model_info").json()["weight_version"]) == (fresh, "step-7")
    back = admin.post("/update_weights", json={"model_path": str(model), "abort_all_requests": True})
    assert back.json()["weight_version"] == str(model)
    assert text(http) == old


def test_a_profile_is_a_file_of_the_requested_steps(http: httpx.Client, admin: httpx.Client, profiles: Path) -> None:
    started = admin.post("/start_profile", json={"num_steps": 1000}).json()
    assert told(admin.post("/start_profile"), 400).startswith("Refused: a profile is running")
    assert list(profiles.glob("treeline-profile-*")) == [Path(started["folder"])]
    text(http)
    path = Path(admin.post("/stop_profile").json()["path"])
    assert path.parent == Path(started["folder"])
    assert path.stat().st_size > 0
    shutil.rmtree(path.parent)
    assert told(admin.post("/stop_profile"), 400).startswith("Refused: no profile is running")


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/sleep?level=3", None, "level"),
        ("/sleep?level=one", None, "level"),
        ("/sleep?mode=keep", None, "mode"),
        ("/sleep?tags=weights", None, "'tags' is not supported"),
        ("/sleep", {"level": 2}, "'level' is not supported"),
        ("/wake_up?tags=kv_cache", None, "'tags' is not supported"),
        ("/update_weights", {}, "model_path"),
        ("/update_weights", {"model_path": ""}, "model_path"),
        ("/update_weights_from_disk", {"model_path": ""}, "model_path"),
        ("/update_weights", {"model_path": "/nowhere"}, "/nowhere is not a folder on the server's machine"),
        ("/update_weights", {"model_path": "/m\0"}, "is not a folder"),
        ("/update_weights", {"model_path": "/m", "load_format": "pt"}, "'load_format' is not supported"),
        ("/update_weights", {"model_path": "/m", "abort_all_requests": 1}, "abort_all_requests"),
        ("/start_profile", {"num_steps": 0}, "num_steps"),
        ("/start_profile", {"num_steps": 10**6}, "num_steps"),
        ("/start_profile", {"output_dir": "/etc"}, "'output_dir' is not supported"),
    ],
)
def test_wrong_requests_are_named_and_change_nothing(
    http: httpx.Client, admin: httpx.Client, path: str, body: Any, problem: str
) -> None:
    assert problem in told(admin.post(path, json=body), 400)
    assert http.get("/ready").status_code == 200


def test_hidden_states_are_in_the_answer_up_to_its_end(http: httpx.Client) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True} | fields.pop("sampling", {})
        body = {"input_ids": list(range(40, 60)), "sampling_params": sampling, "return_hidden_states": True, **fields}
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def rows(answer: dict[str, Any]) -> Any:
        states = answer["meta_info"]["hidden_states"]
        return np.frombuffer(base64.b64decode(states["data"]), "<f4").reshape(states["shape"])

    first = ask(cache_salt="a")
    assert first["meta_info"]["hidden_states"]["first_position"] == 0
    assert rows(first).shape == (25, 32)
    again = ask(cache_salt="a")
    assert again["meta_info"]["hidden_states"]["first_position"] == again["meta_info"]["cached_tokens"] == 16
    np.testing.assert_allclose(rows(again), rows(first)[16:], atol=1e-5)
    stop = first["text"][2:4]
    stopped = ask(cache_salt="b", sampling={"stop": [stop]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(rows(stopped)) == 20 + stopped["meta_info"]["completion_tokens"] - 1
    many = {"max_new_tokens": 1000, "n": 128}  # a small body, and an answer of hundreds of MB
    body = {"text": ["x"] * 8, "return_hidden_states": True, "sampling_params": many}
    assert "--max-bytes-in-flight" in told(http.post("/generate", json=body), 413)
    body = {"text": "x", "return_hidden_states": True, "stream": True}
    assert "not with streams" in told(http.post("/generate", json=body), 400)
