"""`--dp-size N --ep-size N`: engines with attention and caches of their own, whose experts are one model's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, eventually, gone, make_checkpoint, port_flags, running
from treeline_runtime import Engine, SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.deep]

FLAGS = ("--device=cpu", "--max-total-tokens=4096", "--chunked-prefill-size=64")
PROMPTS = [
    ("one two three four five six seven " * (1 + 5 * (i % 4)) + f"and so on {i}", 4 + 7 * (i % 3)) for i in range(12)
]
"""Some of several chunks, with the tokens to answer each."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), experts=8)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    """Return what one engine answers."""
    prompts, greedy = [], []
    for prompt, tokens in PROMPTS:
        prompts.append(prompt)
        greedy.append(SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True))
    with Engine(path, device="cpu", threads=1, max_total_tokens=4096, chunked_prefill_size=64) as engine:
        outputs = engine.generate(prompts, greedy, return_logprob=True)
    return [(output.token_ids, [value for value, _ in output.output_token_logprobs]) for output in outputs]


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[ServerProcess]:
    flags = ("--dp-size=2", "--ep-size=2", "--drain-timeout=0", "--cache-audit=1")
    with running(path, *FLAGS, *flags, *port_flags(2)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(limits=httpx.Limits(max_connections=100)) as client:
        yield client


def answer(http: httpx.Client, number: int, rank: int | None = None, salt: str = "") -> Any:
    """Return the tokens and log probabilities that answer a prompt."""
    prompt, tokens = PROMPTS[number]
    body = {"text": prompt, "return_logprob": True, "extra_key": salt}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    reply = http.post("/generate", json=body, headers=headers)
    reply.raise_for_status()
    found = reply.json()["meta_info"]["output_token_logprobs"]
    return [token for _, token, *_ in found], [logprob for logprob, *_ in found]


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=2e-3)


def num_running(http: httpx.Client) -> list[int]:
    return [load["num_running_reqs"] for load in http.get("/v1/loads").json()["loads"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_answers_like_one_engine_while_the_other_is_idle(
    rank: int, http: httpx.Client, expected: list[Any]
) -> None:
    for number in range(4):  # between them all ranks sleep
        assert_same(answer(http, number, rank), expected[number])


def test_many_requests_at_both_ranks_get_the_answers_of_one_engine(http: httpx.Client, expected: list[Any]) -> None:
    numbers = [*range(len(PROMPTS))] * 2
    with ThreadPoolExecutor(len(numbers)) as threads:
        found = threads.map(lambda at: answer(http, at[1], at[0] % 2, salt=str(at[0] // 5)), enumerate(numbers))
        for number, one in zip(numbers, found, strict=True):
            assert_same(one, expected[number])


def test_requests_that_end_early_leave_the_others_what_they_were(http: httpx.Client, expected: list[Any]) -> None:
    body = {"prompt": "hello " * 30, "max_tokens": 700, "stream": True, "ignore_eos": True}

    def leave(rank: int) -> None:
        with http.stream("POST", "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}) as left:
            next(left.iter_lines())

    with ThreadPoolExecutor(8) as threads:
        left = [threads.submit(leave, rank) for rank in (0, 1, 1)]
        found = list(threads.map(lambda number: answer(http, number, number % 2, salt="left"), range(5)))
        for one in left:
            one.result()
    for number, one in enumerate(found):
        assert_same(one, expected[number])
    eventually(lambda: num_running(http) == [0, 0], what="those that left are ended")


def test_caches_are_audited_while_all_ranks_are_idle(http: httpx.Client, expected: list[Any]) -> None:
    for rank in (0, 1):
        for _ in range(2):
            assert_same(answer(http, 3, rank, salt="audit"), expected[3])

    def audits(what: str) -> list[int]:
        return [state["audits"]["tree"][what] for state in http.get("/server_info").json()["internal_states"]]

    eventually(lambda: all(audits("audited")), what="each rank has audited its cache")
    assert audits("diverged") == [0, 0]


def test_sleep_and_new_weights_are_refused_by_name(server: ServerProcess, path: Path) -> None:
    with server.admin() as admin:
        for url, body in (("/sleep", None), ("/update_weights_from_disk", {"model_path": str(path)})):
            refused = admin.post(url, json=body)
            assert refused.status_code == 400, refused.text
            assert "engines that share experts" in refused.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_server_by_name(path: Path, rank: int) -> None:
    with running(path, *FLAGS, "--dp-size=2", "--ep-size=2", "--no-events") as server:
        pids = server.children_of_ranks("treeline_runtime.scheduler_process")
        body = {"prompt": "hello", "max_tokens": 900, "stream": True, "ignore_eos": True}
        headers = {"X-data-parallel-rank": str(1 - rank)}
        with server.client() as http, http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(pids[rank], signal.SIGKILL)
            assert "killed by SIGKILL" in "".join(lines), "the request at the other rank is told"
        assert server.wait() == 1
        server.wait_for_log(f"the rank {rank} scheduler process was killed by SIGKILL; stopping")
        for pid in pids:
            eventually(lambda pid=pid: gone(pid), what="all ranks end")  # type: ignore[misc]


def test_a_server_stops_while_its_ranks_take_steps(server: ServerProcess) -> None:
    """The last test: it ends the server of all."""
    pids = server.children_of_ranks("treeline_runtime.scheduler_process")
    body = {"prompt": "hello", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    for pid in pids:
        eventually(lambda pid=pid: gone(pid), what="all ranks end")  # type: ignore[misc]
