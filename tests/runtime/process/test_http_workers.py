"""Several HTTP processes on one port: clients cannot tell which of them they have."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_scheduler import Magic
from support.runtime_server import ServerProcess, Stream, eventually, gone, running, sse
from treeline_runtime import SamplingParams
from treeline_runtime.engine import Engine
from treeline_runtime.serve import main

pytestmark = [pytest.mark.integration, pytest.mark.deep]

ALL = {"http", "http-1", "http-2"}
KEY = {"authorization": "Bearer k"}


@dataclasses.dataclass
class Three:
    """A server of three HTTP processes around a scheduler without a model, and a client of each."""

    server: ServerProcess
    clients: dict[str, httpx.Client]
    while_loading: dict[str, httpx.Response]
    """What /health said."""

    def each(self, ask: Callable[[httpx.Client], Any]) -> list[Any]:
        return [ask(client) for client in self.clients.values()]

    def generate(self, name: str, tokens: int = 2, **fields: Any) -> httpx.Response:
        """Asks one of the processes."""
        body = {"input_ids": [50], "sampling_params": {"max_new_tokens": tokens}} | fields
        return self.clients[name].post("/generate", json=body)

    def total(self, name: str) -> float:
        """A metric's sum over all of its labels."""
        with self.server.metrics() as client:
            text = client.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^treeline:{name}{{.*?}} (\S+)$", text, re.MULTILINE))


def _info(client: httpx.Client) -> Any:
    return client.get("/server_info").json()


def _operation(client: httpx.Client) -> Any:
    return _info(client)["operation"]


@pytest.fixture(scope="module")
def three(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    gate = tmp_path_factory.mktemp("three") / "open"
    flags = (
        "--no-events",
        "--http-workers=3",
        "--max-bytes-in-flight=3145728",
        "--watchdog-timeout=3",
    )
    environment = {"FAKE_SCHEDULER_WAITS_FOR": str(gate), "TREELINE_API_KEY": "k", "STOP_S": "0.5"}
    server = ServerProcess(model, *flags, fake=True, environment=environment)
    try:
        listening = {"http", "http-1", "http-2"}
        eventually(lambda: listening <= {"http", *server.children()}, 60, "the workers have been started")
        with server.client_of_each(headers=KEY) as clients:
            while_loading = {name: client.get("/health") for name, client in clients.items()}
            gate.touch()
            server.ready()
            yield Three(server, clients, while_loading)
    finally:
        server.stop()


def test_none_is_ready_before_the_engine_is_and_then_all_are_and_say_the_same(three: Three) -> None:
    assert set(three.clients) == ALL
    assert {answer.status_code for answer in three.while_loading.values()} == {503}
    assert all("still loading" in answer.text for answer in three.while_loading.values())
    assert three.each(lambda client: client.get("/health").status_code) == [200] * 3
    infos = three.each(lambda client: client.get("/server_info").json())
    changing = {"internal_states"}
    told = [{name: value for name, value in info.items() if name not in changing} for info in infos]
    assert told[0] == told[1] == told[2]
    assert (told[0]["http_workers"], told[0]["context_length"]) == (3, 4096)
    assert len({json.dumps(answer) for answer in three.each(lambda client: client.get("/v1/models").json())}) == 1


def test_each_asks_for_the_key_and_refuses_large_bodies_beyond_its_part_of_memory(three: Three) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    refused = three.each(lambda client: client.post("/v1/completions", json=body, headers={"authorization": ""}))
    assert [answer.status_code for answer in refused] == [401] * 3
    half = {"prompt": " " * (600 << 10), "max_tokens": 1}
    whole = {"prompt": " " * (1100 << 10), "max_tokens": 1}
    assert three.each(lambda client: client.post("/v1/completions", json=half).status_code) == [400] * 3
    too_large = three.each(lambda client: client.post("/v1/completions", json=whole))
    assert [answer.status_code for answer in too_large] == [413] * 3
    assert all("more than the 1048576" in answer.json()["error"]["message"] for answer in too_large), "of 3145728"


def test_metrics_are_the_sum_at_once(three: Three) -> None:
    names = ("num_requests_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    before = [three.total(name) for name in names]
    for rounds, name in enumerate(["http", "http-1", "http-2"], 1):
        for _ in range(rounds):
            assert three.generate(name, tokens=rounds).status_code == 200
        after = [three.total(name) for name in names]
        requests = rounds * (rounds + 1) // 2
        tokens = sum(one * one for one in range(1, rounds + 1))
        assert [late - early for late, early in zip(after, before, strict=True)] == [requests, tokens, requests]


def test_one_abort_reaches_the_requests_of_that_name_everywhere(three: Three) -> None:
    silent = {"input_ids": [Magic.SILENT]}
    with ThreadPoolExecutor(4) as pool, three.server.admin() as admin:
        asked: list[Future[httpx.Response]] = [
            pool.submit(three.generate, name, 9, rid="same", **silent) for name in ("http", "http-1", "http-2")
        ]
        other = pool.submit(three.server.client(headers=KEY).post, "/generate", json=silent | {"rid": "other"})
        eventually(lambda: three.total("http_requests_active") == 4, what="all are being answered")
        eventually(lambda: three.total("num_running_reqs") == 4, what="all run")
        assert admin.post("/abort_request", json={"rid": "same"}).status_code == 200
        ended = [answer.result(60).json()["meta_info"]["finish_reason"]["type"] for answer in asked]
        assert ended == ["abort"] * 3
        assert not other.done()
        assert admin.post("/abort_request", json={"abort_all": True}).status_code == 200
        assert other.result(60).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert three.total("http_requests_active") == 0


def test_an_engine_that_fails_one_workers_requests_is_sick_for_all_until_it_answers_any(three: Three) -> None:
    def health() -> set[int]:
        return set(three.each(lambda client: client.get("/health").status_code))

    failed = [three.generate("http-1", input_ids=[Magic.SICKEN]), *(three.generate("http-1") for _ in range(2))]
    assert [answer.status_code for answer in failed] == [500] * 3
    eventually(lambda: health() == {503}, what="/health 503")
    assert "it is sick" in three.clients["http-2"].get("/ready").text
    assert three.generate("http-2", input_ids=[Magic.CURE]).status_code == 200
    eventually(lambda: health() == {200}, what="/health 200")
    assert three.clients["http-1"].get("/health_generate").status_code == 200


def test_the_scheduler_is_asked_by_each_and_answers_who_asked(three: Three) -> None:
    assert three.each(lambda client: client.get("/v1/loads").json()["loads"][0]["pages_total"]) == [4096] * 3


def test_asleep_none_of_them_serves_and_awake_all_do(three: Three) -> None:
    """
    1. a request at each; /sleep?mode=wait: all say so and refuse what is new
    2. the requests end; the moment it has answered all are asleep, to probes and clients
    3. the moment /wake_up has answered all serve
    """
    silent = {"input_ids": [Magic.SILENT]}
    body = {"prompt": "hi", "max_tokens": 1}

    def refused(client: httpx.Client) -> tuple[int, str, str | None]:
        answer = client.post("/v1/completions", json=body)
        return answer.status_code, answer.json()["error"]["message"], answer.headers.get("x-treeline-overloaded")

    with ThreadPoolExecutor(4) as pool, three.server.admin() as admin, three.server.client_of_each(headers=KEY) as busy:
        running = [pool.submit(client.post, "/generate", json=silent | {"rid": "awaited"}) for client in busy.values()]
        eventually(lambda: three.total("num_running_reqs") == 3, what="all run")
        with three.server.admin() as sleeper:
            sleeping = pool.submit(sleeper.post, "/sleep?level=2&mode=wait")
            eventually(lambda: set(three.each(_operation)) == {"going to sleep"}, what="all have been told")
            assert three.each(refused) == [(503, "The engine is going to sleep", "true")] * 3
            assert not any(answer.done() for answer in (sleeping, *running))
            assert admin.post("/abort_request", json={"rid": "awaited"}).status_code == 200
            assert sleeping.result(60).json() == {"asleep": 2}
        assert three.each(refused) == [(503, "The engine is asleep", "true")] * 3
        assert three.each(lambda client: client.get("/ready").json()["error"]["code"]) == ["asleep"] * 3
        assert three.each(lambda client: client.get("/live").status_code) == [200] * 3
        assert [info["asleep"] for info in three.each(_info)] == [2] * 3
        assert [answer.result(60).status_code for answer in running] == [200] * 3
        assert admin.post("/wake_up").json() == {"asleep": 0}
        assert three.each(lambda client: client.get("/ready").status_code) == [200] * 3
        assert [three.generate(name).status_code for name in ALL] == [200] * 3


def test_new_weights_are_the_same_for_all_and_hold_back_the_requests_of_each(three: Three) -> None:
    silent = {"input_ids": [Magic.SILENT]}
    update = {"model_path": "/step-7", "weight_version": "step-7"}

    def version(answer: Future[httpx.Response]) -> str:
        return str(answer.result(60).json()["meta_info"]["weight_version"])

    with ThreadPoolExecutor(5) as pool, three.server.admin() as admin, three.server.client_of_each(headers=KEY) as busy:
        before = pool.submit(busy["http-2"].post, "/generate", json=silent | {"rid": "before"})
        eventually(lambda: three.total("num_running_reqs") == 1, what="it runs")
        with three.server.admin() as updater:
            updating = pool.submit(updater.post, "/update_weights", json=update)
            eventually(lambda: set(three.each(_operation)) == {"loading new weights"}, what="all have been told")
            held = [pool.submit(three.generate, name) for name in three.clients]
            eventually(lambda: three.total("http_requests_active") == 4, what="they are there")
            assert not any(answer.done() for answer in (before, updating, *held))
            assert three.total("num_running_reqs") == 1
            assert admin.post("/abort_request", json={"rid": "before"}).status_code == 200
            assert updating.result(60).json()["weight_version"] == "step-7"
        assert (version(before), [version(answer) for answer in held]) == ("default", ["step-7"] * 3)
        told = [(info["model_path"], info["weight_version"], info["operation"]) for info in three.each(_info)]
        assert told == [("/step-7", "step-7", None)] * 3
        running = [pool.submit(client.post, "/generate", json=silent) for client in busy.values()]
        eventually(lambda: three.total("num_running_reqs") == 3, what="all run")
        again = admin.post("/update_weights", json={"model_path": "/step-8", "abort_all_requests": True})
        assert again.json()["weight_version"] == "/step-8"
        assert [answer.result(60).json()["meta_info"]["finish_reason"]["type"] for answer in running] == ["abort"] * 3
        assert [three.generate(name).json()["meta_info"]["weight_version"] for name in ALL] == ["/step-8"] * 3


def test_a_worker_that_is_asked_says_what_it_is_doing_and_goes_on(three: Three) -> None:
    with open(f"/proc/{three.server.children()['http-1']}/fd/0", "wb") as lifeline:
        lifeline.write(b"?")
    three.server.wait_for_log("http-1 .*asked what it is doing: 0 requests are being answered")
    assert three.generate("http-1").status_code == 200


def test_a_port_that_workers_share_is_not_shared_with_another_server(
    three: Three, capsys: pytest.CaptureFixture[str]
) -> None:
    port = three.server.url.rpartition(":")[2]
    for workers in ("1", "2"):
        assert main(["--model", "m", "--port", port, "--http-workers", workers]) == 1
        assert f"--port: cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_one_that_stands_still_is_noticed(three: Three) -> None:
    """The last of this server."""
    os.kill(three.server.children()["http-2"], signal.SIGSTOP)
    assert three.server.wait(30) == 1
    three.server.wait_for_log("the http-2 has not moved for")


def test_sigterm_drains_all_of_them(start: Any) -> None:
    """
    1. a stream at each; SIGTERM
    2. all say that they drain, and refuse what is new
    3. the streams run to their end; exit status 0
    """
    server = start("--http-workers=2", "--no-events").ready()
    with server.client_of_each() as streaming, server.client_of_each() as asking:
        streams = [Stream(server, tokens=150, client=client).underway() for client in streaming.values()]
        server.process.send_signal(signal.SIGTERM)
        body = {"prompt": "hi", "max_tokens": 2}
        for client in asking.values():
            eventually(lambda c=client: c.get("/ready").status_code == 503, 60, "/ready turns 503")
            refused = eventually(lambda c=client: (r := c.post("/v1/completions", json=body)).status_code == 503 and r)
            assert refused.headers["x-treeline-overloaded"]
            assert client.get("/live").status_code == 200
        assert [stream.ended()[-1] for stream in streams] == ["[DONE]"] * 2
        assert server.wait() == 0


def test_a_worker_that_is_killed_ends_the_server_and_everybody_is_told(start: Any) -> None:
    server = start("--http-workers=3", "--no-events").ready()
    children = server.children()
    with server.client_of_each() as clients:
        streams = {name: Stream(server, tokens=2000, client=client) for name, client in clients.items()}
        for stream in streams.values():
            stream.underway()
        os.kill(children["http-1"], signal.SIGKILL)
        for name in ("http", "http-2"):
            error = json.loads(streams[name].ended()[-1])["error"]
            assert "the http-1 process was killed by SIGKILL" in error["message"]
        assert server.wait(60) == 1
    assert all(gone(pid) for pid in children.values())


def test_a_second_signal_ends_the_workers_streams_at_once_and_nothing_is_left(start: Any) -> None:
    server = start("--http-workers=2", "--no-events", "--drain-timeout=60").ready()
    children = server.children()
    with server.client_of_each() as clients:
        stream = Stream(server, tokens=2000, client=clients["http-1"]).underway()
        for number in (signal.SIGTERM, signal.SIGINT):
            for pid in children.values():  # as a terminal does
                os.kill(pid, number)
            server.process.send_signal(number)
            server.wait_for_log(number.name)
        assert server.wait(30) == 128 + signal.SIGINT
        assert json.loads(stream.ended()[-1])["error"]["message"] == "The server is shutting down"
    assert all(gone(pid) for pid in children.values())
    assert "Traceback" not in "\n".join(server.log)


TINY = Path(__file__).parents[3] / "models" / "tiny"


def test_the_real_engine_answers_and_sleeps_the_same_for_each_and_all_end_with_a_parent_that_is_killed() -> None:
    prompts = [f"The capital of country number {number} is" for number in range(6)]
    with Engine(model=TINY, threads=1, max_total_tokens=4096) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0.0))
    expected = [output.text for output in outputs]
    answers: dict[str, list[str]] = {}

    def ask(name: str, client: httpx.Client) -> None:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                chunks = sse(response)
            assert chunks.pop() == "[DONE]"
            answers.setdefault(name, []).append("".join(chunk["choices"][0]["text"] for chunk in chunks))

    flags = ("--http-workers=3", "--no-events", "--max-total-tokens=4096")
    with running(TINY, *flags) as server, server.client_of_each() as clients:
        asking = [threading.Thread(target=ask, args=each) for each in clients.items()]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(30)
        with server.admin() as admin:
            for path, status in (("/sleep", 503), ("/wake_up", 200)):
                assert admin.post(path).status_code == 200
                assert {client.get("/ready").status_code for client in clients.values()} == {status}
        children = server.children()
        server.process.kill()
        eventually(lambda: all(gone(pid) for pid in children.values()), 60, "the children are gone")
    assert answers == dict.fromkeys(ALL, expected)
