"""Pages travel between runtimes, hosts and disks while processes die and hang, links break, and disks fill up.

Two prefill and two decode servers of the tiny model are behind a picker and Envoy. Clients ask about few documents, so
that prefixes are found on devices, hosts, disks and peers. Each answer is compared with that of a server without any
cache. --chaos-seconds sets how long it lasts at least.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.links import FAR, Links
from support.ports import free_base
from support.prompts import text
from support.runtime_server import ServerProcess, eventually, gone, running
from support.stack import Stack
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Role
from treeline_wire.headers import PAGES_FROM
from treeline_wire.tiny_model import tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.deep, pytest.mark.timeout(1800)]

log = logging.getLogger(__name__)

CLIENTS = 8
PORTS = ("--port", "--events-port", "--replay-port", "--load-port", "--kv-transfer-port")
FLAGS = ("--served-model-name=tiny", "--max-total-tokens=12288", "--cache-audit=0.1", "--host-cache=48MiB")
SURE = 0.1
"""The least difference of log probabilities between the best tokens: rounding does not decide such answers."""


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}


def right_answers() -> dict[str, str]:
    """Return prompts and their answers, as a server without a cache computes them."""
    found = dict[str, str]()
    with running(tiny_model(), "--served-model-name=tiny", "--prefix-cache=off") as server, server.client() as http:
        for seed in range(18):
            document = text(700, seed)
            for question in range(4):
                prompt = f"{document} {text(3 + 40 * question, 100 + question)}"
                answer = http.post("/v1/completions", json=body(prompt, logprobs=2)).raise_for_status().json()
                (choice,) = answer["choices"]
                best = (sorted(top.values()) for top in choice["logprobs"]["top_logprobs"])
                if all(len(two) > 1 and two[-1] - two[-2] > SURE for two in best):
                    found[prompt] = choice["text"]
    assert len(found) > 20, len(found)
    return found


class Node:
    """A server that is killed and started again with the same ports."""

    def __init__(self, name: str, role: Role, folder: Path) -> None:
        self.name, self.role = name, role
        self.base = free_base(len(PORTS))
        ports = [f"{flag}={self.base + i}" for i, flag in enumerate(PORTS)]
        self.disk = folder / name
        self.disk.mkdir(exist_ok=True)
        self.flags = (*FLAGS, *ports, f"--host={FAR}", f"--disk-cache={self.disk}/pages", "--disk-cache-size=256MiB")
        self.server = ServerProcess(tiny_model(), *self.flags)
        self.killed_at = self.ready_at = 0.0
        """ready_at: infinite while it is down."""
        self.loaded = Counter[str]()
        """Tokens that came from each tier, by servers that were killed."""

    @property
    def spec(self) -> EndpointSpec:
        return EndpointSpec(self.name, f"{FAR}:{self.base}", role=self.role)

    @property
    def url(self) -> str:
        return f"http://{FAR}:{self.base}"

    @property
    def pages_port(self) -> int:
        return self.base + len(PORTS) - 1

    @property
    def linked(self) -> range:
        """All ports but that of requests."""
        return range(self.base + 1, self.base + len(PORTS))

    def family(self) -> list[psutil.Process]:
        main = psutil.Process(self.server.process.pid)
        return [main, *main.children(recursive=True)]

    def kill(self) -> None:
        family = self.family()
        self.loaded.update(self.tiers())
        self.ready_at, self.killed_at = float("inf"), time.monotonic()
        for one in family:
            one.kill()
        self.server.process.wait()
        eventually(lambda: all(gone(one.pid) for one in family))
        self.server = ServerProcess(tiny_model(), *self.flags).ready()
        self.ready_at = time.monotonic()

    def hang(self, seconds: float) -> None:
        family = self.family()
        for one in family:
            one.suspend()
        time.sleep(seconds)  # the disturbance itself
        for one in family:
            one.resume()

    def tiers(self) -> dict[str, int]:
        (state,) = httpx.get(f"{self.url}/server_info", timeout=60, trust_env=False).json()["internal_states"]
        return dict(state["tiers"]["total_loaded_tokens"])


@dataclass
class Asked:
    """How requests ended."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    lost: list[Any] = field(default_factory=list)
    cut: int = 0
    """Those whose answering server was killed meanwhile."""


class Clients:
    """Ask until `stop`: through Envoy, or a decode server directly, with another one's address for pages."""

    def __init__(self, url: str, nodes: list[Node], answers: dict[str, str]) -> None:
        self._url, self._nodes, self._answers = url, nodes, answers
        self._stop = threading.Event()
        self.asked = Asked()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._ends = [self._pool.submit(self._run, seed) for seed in range(CLIENTS)]

    def stop(self) -> None:
        self._stop.set()
        for end in self._ends:
            end.result(120)

    def _run(self, seed: int) -> None:
        chance, prompts = random.Random(seed), sorted(self._answers)
        with httpx.Client(timeout=90, trust_env=False) as http:
            while not self._stop.is_set():
                prompt = chance.choice(prompts)
                if chance.random() < 0.5:
                    self._ask(http, "gateway", self._url, prompt, {}, self._decoders)
                else:
                    self._direct(http, chance, prompt)

    @property
    def _decoders(self) -> list[Node]:
        return [node for node in self._nodes if node.role is Role.DECODE]

    def _direct(self, http: httpx.Client, chance: random.Random, prompt: str) -> None:
        up = [node for node in self._decoders if node.ready_at < time.monotonic()]
        node = chance.choice(up or self._decoders)
        other = chance.choice([one for one in self._nodes if one is not node])
        if chance.random() < 0.5:
            with contextlib.suppress(httpx.HTTPError):
                http.post(f"{other.url}/v1/completions", json=body(prompt, max_tokens=1), timeout=20)
        self._ask(http, "pull", node.url, prompt, {PAGES_FROM: f"{FAR}:{other.pages_port}"}, [node])

    def _ask(
        self, http: httpx.Client, kind: str, url: str, prompt: str, headers: dict[str, str], nodes: list[Node]
    ) -> None:
        began, asked = time.monotonic(), self.asked
        try:
            answer = http.post(f"{url}/v1/completions", json=body(prompt), headers=headers)
            said = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
            why = answer.text[:300]
        except httpx.HTTPError as error:
            said, why = None, repr(error)
        if said is not None:
            if said == self._answers[prompt]:
                asked.right[kind] += 1
            else:
                asked.wrong.append((kind, said, self._answers[prompt]))
        elif any(node.killed_at > began or (kind == "pull" and node.ready_at > began) for node in nodes):
            asked.cut += 1
        else:
            asked.lost.append((kind, why))


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of 24 MiB there, where the system lets us; says whether."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


class Disturbances:
    """What happens to the nodes, one thing after the other."""

    def __init__(self, nodes: list[Node], links: Links, full: Path | None) -> None:
        self._nodes, self._links, self._full = nodes, links, full
        self.done = Counter[str]()

    def run(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Disturb for so many seconds, and until it is enough."""
        chance, until = random.Random(7), time.monotonic() + seconds
        kinds = [self.kill, self.hang, self.cut, self.freeze, self.spoil, self.flush, *([self.fill] * bool(self._full))]
        while time.monotonic() < until or not enough():
            for kind in chance.sample(kinds, len(kinds)):
                kind(chance)
                self.done[kind.__name__] += 1

    def kill(self, chance: random.Random) -> None:
        chance.choice(self._nodes).kill()

    def hang(self, chance: random.Random) -> None:
        chance.choice(self._nodes).hang(chance.uniform(0.2, 3))

    def cut(self, chance: random.Random) -> None:
        self._break(chance, self._links.cut)

    def freeze(self, chance: random.Random) -> None:
        self._break(chance, self._links.freeze)

    def _break(self, chance: random.Random, how: Callable[..., None]) -> None:
        """Break the links to the pages, events and load reports of one."""
        how(*chance.choice(self._nodes).linked)
        time.sleep(chance.uniform(0.2, 3))
        self._links.mend()

    def spoil(self, chance: random.Random) -> None:
        """Change bytes of stored pages."""
        for page in chance.choice(self._nodes).disk.rglob("*"):
            with contextlib.suppress(OSError):
                if page.is_file() and page.stat().st_size > 4096 and chance.random() < 0.2:
                    with page.open("r+b") as file:
                        file.seek(chance.randrange(page.stat().st_size))
                        file.write(bytes([chance.randrange(256)]))

    def flush(self, chance: random.Random) -> None:
        node = chance.choice(self._nodes)
        with contextlib.suppress(httpx.HTTPError), node.server.admin() as http:
            http.post("/flush_cache")

    def fill(self, chance: random.Random) -> None:
        """Fill the small disk, and make room again."""
        assert self._full is not None
        file = self._full / "others"
        with contextlib.suppress(OSError), file.open("wb") as opened:
            while True:
                opened.write(bytes(1 << 20))
                opened.flush()
        time.sleep(chance.uniform(0.2, 3))
        file.unlink()


def test_no_answer_is_wrong_and_none_is_lost_while_everything_breaks(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    answers = right_answers()
    with ExitStack() as stack:
        (tmp_path / "d0").mkdir()
        small = stack.enter_context(small_disk(tmp_path / "d0"))
        roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
        nodes = [Node(name, role, tmp_path) for name, role in roles.items()]
        for node in nodes:
            stack.callback(lambda one=node: one.server.stop())
            node.server.ready()
        links = Links(port for node in nodes for port in node.linked)
        stack.callback(links.close)
        path = Stack(tmp_path / "stack", engines=tuple(node.spec for node in nodes))
        stack.callback(path.close)
        path.start("picker", "envoy")
        clients = Clients(path.url, nodes, answers)
        disturbances = Disturbances(nodes, links, tmp_path / "d0" if small else None)
        try:
            disturbances.run(
                request.config.getoption("--chaos-seconds"),
                lambda: len(clients.asked.right) == 2 and min(clients.asked.right.values()) > 20,
            )
        finally:
            clients.stop()
        asked, used = clients.asked, Counter[str]()
        for node in nodes:
            eventually(node.server.idle, what=f"{node.name} is idle")
            used += node.loaded + Counter(node.tiers())
            health = httpx.get(f"{node.url}/health", trust_env=False)
            assert health.json() == {"status": "ready"}, health.text
        ways = {name: n for name, n in path.metrics().items() if n and re.search("epp_forms|epp_prefills_", name)}
        log.info("right %s, cut %d, wrong %d, lost %d", dict(asked.right), asked.cut, len(asked.wrong), len(asked.lost))
        log.info("disturbances %s", dict(disturbances.done))
        log.info("tokens loaded %s; the picker's counters %s", dict(used), ways)
        assert not asked.wrong, asked.wrong[:3]
        assert not asked.lost, asked.lost[:3]
        assert used["CPU"] > 0, used
        assert used["PEER"] > 0, used
