"""A pool of `engine.type: vllm` with an unmodified vLLM in its pods: the operator's probes start it, its events lead
the second turn of a conversation to the pod of the first, and its pods leave and die cleanly. `make e2e-vllm` runs it:
no other journey has vLLM's image."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import httpx
import pytest
from treeline_wire import ports

from e2e.cluster.images import ENGINES, VLLM
from e2e.kit.faults import kill_runtime
from e2e.kit.hub import hub
from e2e.kit.kube import condition
from e2e.kit.system import Installed
from e2e.kit.vllm import vllm_pool

pytestmark = [
    pytest.mark.engines,
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(VLLM not in os.environ.get(ENGINES, "").split(), reason="vLLM is asked for by `make e2e-vllm`"),
]

START_S = 900.0
"""Two servers load at once, on a few cores."""
ANSWER_S = 120.0
BLOCK = 32
LONG = 1200


@pytest.fixture(scope="module")
def treeline(of_this_file: Installed) -> Iterator[Installed]:
    of_this_file.apply(*hub(), vllm_pool("tiny"))
    of_this_file.await_ready("tiny", seconds=START_S)
    of_this_file.until(lambda: followed(of_this_file) == 2, "the picker to follow both")
    yield of_this_file
    of_this_file.conclude()


@dataclass(frozen=True)
class Turn:
    """The answer's host, prompt tokens and cached tokens, by vLLM's own count."""

    host: str
    prompt: int
    cached: int


@dataclass
class Talk:
    """A conversation whose beginning no other one shares."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules = f"These are the rules of conversation {self.number}. " + "Answer in one short sentence. " * 60
        self.messages.append({"role": "system", "content": rules})

    def say(self, url: str, text: str) -> Turn:
        """Send one turn and return its answer."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_S)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        self.messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
        usage = told["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        host = answer.headers["x-treeline-endpoint"].rpartition(":")[0]
        self.turns.append(Turn(host, usage["prompt_tokens"], cached))
        return self.turns[-1]


def followed(treeline: Installed) -> float:
    """Return how many publishers the picker follows without a gap."""
    return treeline.picker_metrics().get('treeline_epp_kv_subscriptions{state="live"}', 0.0)


def held(treeline: Installed) -> float:
    """Return how many prompt tokens the chosen pods held, by their events."""
    return treeline.picker_metrics()["treeline_epp_routed_held_tokens_total"]


def believed(treeline: Installed, pod: dict[str, Any]) -> int:
    """Return how many tokens the picker believes a pod's cache holds."""
    (picker,) = treeline.ready_pods("epp")
    (pool,) = treeline.page(picker, f"http://127.0.0.1:{ports.PICKER_ADMIN}/endpoints")["pools"].values()
    name = pod["metadata"]["name"]
    return next(int(one["cached_tokens"]) for one in pool["endpoints"] if one["name"] == name)


def tell(text: str) -> None:
    """Print a measurement of the run; `pytest -rP` shows it."""
    sys.stdout.write(f"{text}\n")


def address(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


def restarts(pod: dict[str, Any]) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def seconds_to_ready(pod: dict[str, Any]) -> float:
    made, ready = pod["metadata"]["creationTimestamp"], condition(pod, "Ready")["lastTransitionTime"]
    return (datetime.fromisoformat(ready) - datetime.fromisoformat(made)).total_seconds()


def pod_at(treeline: Installed, host: str) -> dict[str, Any]:
    return next(pod for pod in treeline.pods("runtime") if pod["status"].get("podIP") == host)


def hits_again(treeline: Installed, host: str, first: int) -> Turn:
    """Return the second turn of a new conversation that meets its first turn's blocks at the pod."""
    numbers = iter(range(first, first + 100))

    def found() -> Turn | None:
        talk, url = Talk(next(numbers)), treeline.url()
        turns = [talk.say(url, "What is the capital of Peru?"), talk.say(url, "And of Japan?")]
        return turns[1] if [turn.host for turn in turns] == [host] * 2 and turns[1].cached >= BLOCK else None

    turn: Turn = treeline.until(found, f"a hit at {host}")
    return turn


def test_vllm_becomes_ready_by_its_probes_and_is_routed_by_its_events(treeline: Installed) -> None:
    pods = treeline.ready_pods("runtime")
    assert len(pods) == 2
    assert {restarts(pod) for pod in pods} == {0}, "no probe ended one"
    tell(f"ready {max(seconds_to_ready(pod) for pod in pods):.0f} s after they were made")
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/health"}
        assert container["command"] == ["vllm", "serve"]
    pool = treeline.pool("tiny")
    assert condition(pool, "Ready")["reason"] == "Serving"
    assert pool["status"]["routing"] == {"way": "events"}
    routed = {name: value for name, value in treeline.picker_metrics().items() if "endpoints_routed{" in name and value}
    assert list(routed.values()) == [2.0]
    assert 'way="events"' in next(iter(routed))


def test_a_turn_goes_to_the_pod_that_cached_the_previous_one(treeline: Installed) -> None:
    url, before = treeline.url(), held(treeline)
    talks = [Talk(number) for number in range(6)]
    for country in ("France", "Peru", "Japan", "Kenya"):
        for talk in talks:
            talk.say(url, f"What is the capital of {country}?")
    known = held(treeline) - before
    later = [pair for talk in talks for pair in pairwise(talk.turns)]
    possible = sum(turn.prompt // BLOCK * BLOCK for turn, _ in later)
    cached = sum(turn.cached for _, turn in later)
    tell(f"{len(talks)} conversations of {len(talks[0].turns)} turns: {cached} tokens of prompts were cached;")
    tell(f"all whole blocks of the prompts before are {possible}; the picker knew of {known:g}")
    assert len({turn.host for talk in talks for turn in talk.turns}) == 2, "both have their share"
    assert cached >= 0.95 * possible
    # A block at the end of what was published counts when the text goes on beyond it: one at a request is not known.
    assert 0 <= cached - known <= BLOCK * len(later)


def test_a_deleted_pod_ends_its_answers_and_another_takes_its_place(treeline: Installed) -> None:
    url, talk = treeline.url(), Talk(100)
    talk.say(url, "What is the capital of France?")
    assert talk.say(url, "And of Peru?").cached >= BLOCK
    going = pod_at(treeline, talk.turns[-1].host)
    stream = Stream(url, talk.messages)
    treeline.until(lambda: stream.tokens > 5, "an answer to begin")
    assert stream.host == talk.turns[-1].host, "it goes where its beginning is"
    treeline.delete_pod(going)
    deleted = time.monotonic()
    treeline.until(lambda: talk.say(url, "And of Japan?").host != stream.host, "turns to go elsewhere")
    stream.thread.join(240.0)
    tell(f"the answer under way ended {stream.ended - deleted:.1f} s after the deletion, with {stream.tokens} tokens")
    assert stream.ended > deleted, "it was under way"
    assert (stream.tokens, stream.finish) == (LONG, "length"), "whole"

    def replaced() -> dict[str, Any] | None:
        names = {pod["metadata"]["name"]: pod for pod in treeline.ready_pods("runtime")}
        names.pop(going["metadata"]["name"], None)
        new = [pod for pod in names.values() if pod["status"]["startTime"] >= going["metadata"]["creationTimestamp"]]
        return max(new, key=lambda pod: pod["status"]["startTime"]) if len(names) == 2 else None

    new = treeline.until(replaced, "another pod to be ready", START_S)
    treeline.await_ready("tiny")
    treeline.until(lambda: followed(treeline) == 2, "the picker to follow both")
    tell(f"another was followed {time.monotonic() - deleted:.0f} s after it; {hits_again(treeline, address(new), 200)}")
    assert treeline.pool("tiny")["status"]["routing"] == {"way": "events"}


def test_a_killed_pod_restarts_without_credited_blocks(treeline: Installed) -> None:
    url, talk = treeline.url(), Talk(101)
    talk.say(url, "What is the capital of France?")
    assert talk.say(url, "And of Peru?").cached >= BLOCK
    victim = pod_at(treeline, talk.turns[-1].host)
    assert believed(treeline, victim) > 0
    kill_runtime(treeline.kube, victim)
    killed = time.monotonic()
    host = address(victim)
    treeline.until(lambda: restarts(pod_at(treeline, host)) > restarts(victim), "its container to end")
    assert talk.say(url, "And of Japan?").host != host
    treeline.await_ready("tiny", seconds=START_S)
    treeline.until(lambda: followed(treeline) == 2, "the picker to follow both")
    back = time.monotonic()
    assert believed(treeline, victim) == 0, "nothing of the old process is credited to the new one"
    tell(f"killed, and followed again after {back - killed:.0f} s; {hits_again(treeline, host, 300)}")
    assert believed(treeline, victim) > 0


def test_every_rank_of_a_pod_is_followed(treeline: Installed) -> None:
    engine = {"dataParallel": 2, "resources": {"limits": {"memory": "11Gi"}}}
    treeline.change("tiny", replicas=1, engine=engine)
    treeline.await_ready("tiny", seconds=START_S)
    treeline.until(lambda: followed(treeline) == 2, "the picker to follow both ranks")
    (pod,) = treeline.ready_pods("runtime")
    assert {"kv-events", "kv-events-1"} <= {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    talks = [Talk(number) for number in range(400, 406)]
    for country in ("France", "Peru", "Japan"):
        for talk in talks:
            talk.say(treeline.url(), f"What is the capital of {country}?")
    # vLLM itself chooses the rank by load: a conversation may start again at the other one.
    cached = [talk.turns[-1].cached for talk in talks]
    tell(f"a pod of two ranks: {sum(hit > 0 for hit in cached)} of {len(talks)} third turns found their blocks")
    assert sum(cached) > 0
    assert believed(treeline, pod) > 0
    assert treeline.pool("tiny")["status"]["routing"] == {"way": "events"}


class Stream:
    """A long answer, read in a thread."""

    def __init__(self, url: str, messages: list[dict[str, str]]) -> None:
        self.tokens, self.finish, self.ended, self.host = 0, "", 0.0, ""
        self._url = url
        self._body = {
            "model": "tiny",
            "messages": [*messages, {"role": "user", "content": "Go on."}],
            "max_tokens": LONG,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            self._follow()
        except httpx.HTTPError as error:
            self.finish = repr(error)
        self.ended = time.monotonic()

    def _follow(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=ANSWER_S) as answer:
            self.host = answer.headers.get("x-treeline-endpoint", "").rpartition(":")[0]
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                self.tokens = (chunk.get("usage") or {}).get("completion_tokens", self.tokens)
                for choice in chunk["choices"]:
                    self.finish = choice["finish_reason"] or self.finish
