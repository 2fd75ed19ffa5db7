"""64 clients at once through the real server, with a cache much smaller than their load: they leave in every phase,
stop at random strings, send invalid requests. The others get a quiet server's answers, and nothing is left over.

Retractions are rare here; tests/runtime/scheduler/test_stress.py has them for sure.

`pytest tests/runtime/server/test_chaos.py --chaos-seconds 300` is the long form.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.runtime_server import ServerProcess, eventually, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.deep]

TINY = Path(__file__).parents[3] / "models" / "tiny"
CLIENTS = 64
TOKENS = 24
END = json.loads((TINY / "config.json").read_text())["eos_token_id"]
FLAGS = ("--page-size=4", "--max-total-tokens=512", "--max-running-requests=32", "--chunked-prefill-size=96")
RSS_GROWTH = 48 << 20
"""Bytes of all processes together, after the first third of the load."""


def prompts() -> list[str]:
    """Families with shared beginnings, from a few tokens to several chunks."""
    rng = random.Random(0)
    words = ["the", "capital", "of", "France", "is", "Paris", "and", "what", "answer", "to", "a", "question", "one"]
    families = [" ".join(rng.choices(words, k=100)) for _ in range(3)]
    return [
        f"{' '.join(rng.choice(families).split()[: rng.choice([2, 20, 60, 100])])} {' '.join(rng.choices(words, k=4))}"
        for _ in range(10)
    ]


@dataclass(frozen=True)
class Quiet:
    """The answer of a server without other requests."""

    prompt: str
    ids: list[int]
    text: str


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY, *FLAGS, module="support.chaos_serve") as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[Quiet]:
    with server.client() as http:
        found = []
        for prompt in prompts():
            answer = http.post("/generate", json=body(prompt)).json()
            found.append(Quiet(prompt, answer["output_ids"], answer["text"]))
        return found


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    never = dict.fromkeys(map(str, END), -100)  # whose length was fixed (ignore_eos) would never be retracted
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "logit_bias": never} | fields.pop("sampling", {})
    return {"text": prompt, "sampling_params": sampling, **fields}


@dataclass
class Chaos:
    """The clients; each goes on until `until` (monotonic seconds)."""

    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    expected: list[Quiet]
    until: float
    done: Counter[str] = field(default_factory=Counter)
    names: Iterator[int] = field(default_factory=itertools.count)

    async def client(self, seed: int) -> None:
        rng = random.Random(seed)
        actions = {
            self.whole: 5, self.stream: 3, self.leave_early: 3, self.leave_later: 3, self.aborted: 2, self.stopped: 4,
            self.refused: 1,
        }  # fmt: skip
        while time.monotonic() < self.until:
            (action,) = rng.choices([*actions], [*actions.values()])
            await action(rng, rng.choice(self.expected))
            self.done[action.__name__] += 1

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post("/generate", json=request)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def whole(self, rng: random.Random, quiet: Quiet) -> None:
        count = rng.randint(1, TOKENS)
        answer = await self.ask(body(quiet.prompt, sampling={"max_new_tokens": count}))
        assert answer["output_ids"] == quiet.ids[:count], quiet.prompt

    async def stream(self, _: random.Random, quiet: Quiet) -> None:
        last = ""
        async with self.http.stream("POST", "/generate", json=body(quiet.prompt, stream=True)) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last = line
        found = json.loads(last.removeprefix("data: "))
        assert (found["output_ids"], found["text"]) == (quiet.ids, quiet.text)

    async def leave_early(self, rng: random.Random, quiet: Quiet) -> None:
        """Leave while the request waits, or its prompt is computed, or a little later."""
        try:
            async with asyncio.timeout(rng.uniform(0, 0.3)):
                await self.http.post("/generate", json=body(quiet.prompt))
        except TimeoutError:
            return

    async def leave_later(self, rng: random.Random, quiet: Quiet) -> None:
        count = rng.randint(1, TOKENS // 2)
        async with self.http.stream("POST", "/generate", json=body(quiet.prompt, stream=True)) as answer:
            lines = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
            async for line in lines:
                count -= 1
                found = json.loads(line.removeprefix("data: "))
                assert found["output_ids"] == quiet.ids[: len(found["output_ids"])]
                if not count:
                    return

    async def aborted(self, rng: random.Random, quiet: Quiet) -> None:
        rid = f"r{next(self.names)}"
        asking = asyncio.create_task(self.ask(body(quiet.prompt, rid=rid)))
        await asyncio.sleep(rng.uniform(0, 0.2))
        assert (await self.admin.post("/abort_request", json={"rid": rid})).status_code == 200
        found = await asking
        assert found["output_ids"] == quiet.ids[: len(found["output_ids"])]

    async def stopped(self, rng: random.Random, _: Quiet) -> None:
        quiet = rng.choice([one for one in self.expected if len(one.text) > 8 and one.text.isascii()])
        start = rng.randrange(len(quiet.text) - 3)
        stop = quiet.text[start : start + rng.randint(1, 3)]
        found = await self.ask(body(quiet.prompt, sampling={"stop": [stop]}))
        assert found["text"] == quiet.text[: quiet.text.index(stop)], (quiet.prompt, stop)

    async def refused(self, rng: random.Random, quiet: Quiet) -> None:
        wrong = rng.choice([body(quiet.prompt * 400), body(quiet.prompt, sampling={"top_p": 7}), body("", nonsense=1)])
        assert (await self.http.post("/generate", json=wrong)).status_code == 400


def resident(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


async def test_surviving_clients_get_correct_answers_and_nothing_is_left(
    server: ServerProcess, expected: list[Quiet], request: pytest.FixtureRequest
) -> None:
    seconds = request.config.getoption("--chaos-seconds")
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http,
        httpx.AsyncClient(base_url=server.admin_url, timeout=120, limits=limits) as admin,
    ):
        chaos = Chaos(http, admin, expected, time.monotonic() + seconds)
        early: list[int] = []
        asyncio.get_running_loop().call_later(seconds / 3, lambda: early.append(resident(processes)))
        async with asyncio.TaskGroup() as clients:
            for seed in range(CLIENTS):
                clients.create_task(chaos.client(seed))
    grown = resident(processes) - early[0]
    assert all(chaos.done[name] for name in ("whole", "stream", "leave_early", "leave_later", "aborted", "stopped"))
    with server.client() as quiet, server.admin() as admin_now:

        def load() -> dict[str, Any]:
            return dict(quiet.get("/v1/loads").json()["loads"][0])

        eventually(lambda: load()["num_total_reqs"] == 0 and load()["pages_used"] == 0, 60, "everything has ended")
        assert admin_now.post("/flush_cache").status_code == 200
        assert load()["pages_cached"] == 0
        again = quiet.post("/generate", json=body(expected[0].prompt)).json()
        assert again["output_ids"] == expected[0].ids
    wrong = [line for line in server.log if " ERROR " in line or "Traceback" in line]
    assert wrong == [], wrong[:5]
    assert grown < RSS_GROWTH, f"{grown >> 20} MiB more after {dict(chaos.done)}"
