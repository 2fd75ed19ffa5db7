"""`--dp-size`: several engines behind one server, each with a cache, publisher and load of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from support.fake_scheduler import Magic
from support.runtime_server import ServerProcess, Stream, eventually, gone, port_flags, running, sse
from treeline_wire import frames
from treeline_wire.events import decode_batch
from treeline_wire.load import LOAD_TOPIC, LoadStat, decode_load

pytestmark = [pytest.mark.integration, pytest.mark.deep]

RANK = "X-data-parallel-rank"
BODY = {"prompt": "hello world, how are you?", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    flags = ("--dp-size=2", "--max-total-tokens=4096", "--enable-debug-endpoints", *port_flags(2))
    with running(model, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def admin(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.admin() as client:
        yield client


def computed(http: httpx.Client) -> list[int]:
    """Return the prompt tokens that each rank has computed."""
    return [load["total_prefill_uncached_tokens"] for load in http.get("/v1/loads").json()["loads"]]


def running_of(http: httpx.Client) -> list[int]:
    return [load["num_running_reqs"] for load in http.get("/v1/loads").json()["loads"]]


def first_of(server: ServerProcess, what: str, rank: int) -> zmq.Socket[bytes]:
    """Return a subscriber to a port of a rank."""
    with server.client() as client:
        base = client.get("/server_info").json()["kv_events"][f"{what}_port_base"]
    made = zmq.Context.instance().socket(zmq.SUB)
    made.connect(f"tcp://127.0.0.1:{base + rank}")
    made.subscribe(b"")
    return made


def test_requests_run_at_the_rank_that_they_name(http: httpx.Client) -> None:
    for rank, how in (
        (1, {"headers": {RANK: "1"}}),
        (0, {"headers": {RANK: "0"}}),
        (1, {"json": BODY | {"routed_dp_rank": 1}}),
        (0, {"json": BODY | {"data_parallel_rank": 0}}),
        (1, {"json": BODY | {"routed_dp_rank": 1}, "headers": {RANK: "1"}}),
        (1, {"json": BODY | {"routed_dp_rank": 0}, "headers": {RANK: "1", "x-treeline-edge": "true"}}),
    ):
        before = computed(http)
        body: dict[str, Any] = {"json": BODY, **how}
        body["json"] = body["json"] | {"cache_salt": str(how)}  # nothing of it is cached
        assert http.post("/v1/completions", **body).status_code == 200
        grown = [after > then for after, then in zip(computed(http), before, strict=True)]
        assert grown == [rank == 0, rank == 1], how


def test_a_header_and_a_body_that_name_different_ranks_are_refused(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json=BODY | {"routed_dp_rank": 0}, headers={RANK: "1"})
    assert refused.status_code == 400
    assert "names rank 1, and the body names rank 0" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_rank_that_there_is_not_is_refused_by_name(http: httpx.Client, path: str) -> None:
    body = BODY if path == "/v1/completions" else {"text": "hello"}
    for named in ("2", "-1", "one", "1.0", ""):
        refused = http.post(path, json=body, headers={RANK: named})
        assert refused.status_code == 400, named
        assert refused.json()["error"]["param"] == RANK.lower()
        assert "expected a rank from 0 to 1" in refused.json()["error"]["message"]
    for name in ("routed_dp_rank", "data_parallel_rank"):
        for value in (2, "1", 1.5, True):
            refused = http.post(path, json=body | {name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert http.post(path, json=body | {name: None}).status_code == 200


def test_requests_that_name_no_rank_go_where_fewest_run(server: ServerProcess, http: httpx.Client) -> None:
    streams = [Stream(server, 900, prompt="one", ignore_eos=True).underway() for _ in range(4)]
    eventually(lambda: running_of(http) == [2, 2], 60, "each rank has two")
    with server.admin() as admin:
        admin.post("/abort_request", json={"abort_all": True}).raise_for_status()
    for stream in streams:
        assert stream.ended()[-1] == "[DONE]"
    eventually(lambda: running_of(http) == [0, 0], 60, "all ranks have ended theirs")


def test_a_client_that_leaves_ends_its_request_at_its_rank(server: ServerProcess, http: httpx.Client) -> None:
    body = BODY | {"stream": True, "max_tokens": 900, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body, headers={RANK: "1"}) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is gone has closed the connection
        next(lines)
        eventually(lambda: running_of(http) == [0, 1], 60, "it runs there")
    eventually(lambda: running_of(http) == [0, 0], 60, "it is aborted")


def test_both_ranks_stream_and_stop(http: httpx.Client) -> None:
    texts = []
    for rank in "01":
        body = BODY | {"stream": True, "max_tokens": 30, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body, headers={RANK: rank}) as answer:
            events = sse(answer)
        texts.append("".join(event["choices"][0]["text"] for event in events[:-1]))
        stop = texts[-1][5:8]
        cut = http.post("/v1/completions", json=body | {"stream": False, "stop": stop}, headers={RANK: rank}).json()
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["choices"][0]["text"] == texts[-1].partition(stop)[0]
    assert texts[0] == texts[1], "they have the same weights"
    eventually(lambda: running_of(http) == [0, 0], 60, "the schedulers know that they stopped")


def test_every_rank_has_a_cache_and_publishes_it(server: ServerProcess, http: httpx.Client) -> None:
    prompt = {"prompt": "the quick brown fox jumps over the lazy dog " * 4, "max_tokens": 2}
    subscribers = [first_of(server, "endpoint", rank) for rank in range(2)]
    loads = [first_of(server, "load_endpoint", rank) for rank in range(2)]
    for load in loads:
        assert load.poll(60_000), "the port is served, and so are the others"

    def cached(rank: int) -> int:
        answer = http.post("/v1/completions", json=prompt, headers={RANK: str(rank)})
        return int(answer.headers["x-treeline-cached-tokens"])

    assert cached(0) == 0
    assert cached(0) > 0
    assert cached(1) == 0, "the other rank has not seen it"
    for rank, subscriber in enumerate(subscribers):
        assert subscriber.poll(60_000)
        assert decode_batch(frames.parse_live(subscriber.recv_multipart())[2]).dp_rank == rank
        topic, _, payload = frames.parse_live(loads[rank].recv_multipart())
        while topic != LOAD_TOPIC:
            topic, _, payload = frames.parse_live(loads[rank].recv_multipart())
        report = decode_load(topic, payload)
        assert isinstance(report, LoadStat)
        assert report.attn_dp_rank == rank
    for socket in (*subscribers, *loads):
        socket.close(linger=0)


def test_pages_tell_each_rank(server: ServerProcess, http: httpx.Client, admin: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert (info["dp_size"], info["kv_events"]["dp_size"]) == (2, 2)
    assert [state["dp_rank"] for state in info["internal_states"]] == [0, 1]
    loads = http.get("/v1/loads").json()
    assert (loads["dp_rank_count"], [load["dp_rank"] for load in loads["loads"]]) == (2, [0, 1])
    with server.metrics() as metrics:
        page = metrics.get("/metrics").text
    for rank in range(2):
        assert f'treeline:num_running_reqs{{dp_rank="{rank}"' in page
    assert 'treeline:num_requests_total{model_name="' in page
    assert http.get("/health_generate").status_code == 200
    assert admin.get("/debug/radix?dp_rank=1").status_code == 200
    assert admin.get("/debug/radix?dp_rank=2").status_code == 400


def test_administration_is_for_all_ranks(server: ServerProcess, http: httpx.Client, admin: httpx.Client) -> None:
    def levels() -> list[int]:
        return [load["asleep"] for load in http.get("/v1/loads").json()["loads"]]

    prompt = BODY | {"prompt": "flushed at all ranks " * 8}
    for rank in "01":
        http.post("/v1/completions", json=prompt, headers={RANK: rank}).raise_for_status()
    assert admin.post("/flush_cache").status_code == 200
    for rank in "01":
        answer = http.post("/v1/completions", json=prompt, headers={RANK: rank})
        assert answer.headers["x-treeline-cached-tokens"] == "0"

    stream = Stream(server, 200, prompt="one", ignore_eos=True).underway()
    assert admin.post("/flush_cache").status_code == 400
    assert admin.post("/sleep?mode=wait").json() == {"asleep": 1}
    assert stream.ended()[-1] == "[DONE]"
    assert levels() == [1, 1]
    assert http.post("/v1/completions", json=BODY).status_code == 503
    again = admin.post("/sleep")
    assert again.status_code == 400
    assert again.json()["error"]["message"] == (
        "Refused by rank 0: it is already asleep, at level 1 (ranks that have done it: none)"
    )
    assert admin.post("/wake_up").json() == {"asleep": 0}
    assert levels() == [0, 0]
    same = {"model_path": http.get("/server_info").json()["model_path"]}
    assert admin.post("/update_weights", json=same).status_code == 200
    began = admin.post("/start_profile", json={"num_steps": 1000})
    assert began.status_code == 200
    http.post("/v1/completions", json=BODY).raise_for_status()
    paths = admin.post("/stop_profile").json()["paths"]
    assert len(paths) == 2
    assert all(Path(path).parent == Path(began.json()["folder"]) for path in paths)


def test_the_death_of_a_ranks_child_ends_the_server(start: Any) -> None:
    for victim in ("scheduler", "publisher"):
        server = start("--dp-size=2", *port_flags(2)).ready()
        children = [pid for name in ("scheduler", "detokenizer", "publisher") for pid in server.children_of_ranks(name)]
        assert len(children) == 6
        stream = Stream(server, 2000).underway()
        os.kill(server.children_of_ranks(victim)[1], signal.SIGKILL)
        assert f"the rank 1 {victim} process was killed by SIGKILL" in stream.ended()[-1]
        assert server.wait(60) == 1
        assert all(gone(pid) for pid in children)


def test_a_rank_that_fails_is_not_hidden_by_another(start: Any) -> None:
    server = start("--dp-size=2", "--no-events").ready()
    with server.client() as http:
        for _ in range(3):
            body = {"input_ids": [Magic.SICKEN], "sampling_params": {"max_new_tokens": 2}}
            assert http.post("/generate", json=body, headers={RANK: "1"}).status_code == 500
            assert http.post("/v1/completions", json=BODY, headers={RANK: "0"}).status_code == 200
        refused = eventually(lambda: (found := http.get("/ready")).status_code == 503 and found, 60)
        assert refused.json()["error"]["message"].startswith("The engine of rank 1 cannot answer")
        assert http.post("/v1/completions", json=BODY, headers={RANK: "0"}).status_code == 200
        assert http.get("/ready").status_code == 503
        cure = {"input_ids": [Magic.CURE], "sampling_params": {"max_new_tokens": 2}}
        http.post("/generate", json=cure, headers={RANK: "1"})
        eventually(lambda: http.get("/ready").status_code == 200, 60, "it answers again")


def test_ports_that_cannot_be_counted_up_are_refused(model: Path) -> None:
    for flags, said in (
        (["--events-port=0"], "--events-port: 0 is not the first of 2 ports"),
        (["--load-port=65535"], "--load-port: 65535 is not the first of 2 ports"),
    ):
        server = ServerProcess(model, "--dp-size=2", *port_flags(2), *flags, fake=True)
        assert server.wait(60) != 0
        server.wait_for_log(said)
    clash = ServerProcess(model, "--dp-size=2", *port_flags(2), "--events-port=4000", "--replay-port=4001", fake=True)
    assert clash.wait(60) != 0
    clash.wait_for_log("--replay-port: 4001 is already the port of --events-port")
