"""Two workers behind a real Envoy of two threads: no errors, and each has its part, whatever becomes of one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.envoy import Envoy, running_envoy
from support.epp_io import FakeEngine, engines, until
from support.http import client
from support.ports import free_ports
from support.workers import PickerOfWorkers, picker_of_workers
from treeline_operator.envoy import EnvoyConfig
from treeline_wire import headers as names

CLIENTS = 24


@dataclass
class Plane:
    """Envoy, a picker of two workers, and engines."""

    envoy: Envoy
    picker: PickerOfWorkers
    fakes: list[FakeEngine]

    async def send(self, prompts: list[str], **headers: str) -> list[httpx.Response]:
        """Each on a connection of its own, so that both threads of Envoy have some; side by side."""

        async def one(prompt: str) -> httpx.Response:
            async with client(base_url=self.envoy.url, timeout=30, headers=headers) as http:
                return await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})

        return list(await asyncio.gather(*map(one, prompts)))

    async def decided(self) -> Counter[str]:
        """How many decisions each worker has taken, by its process."""
        shown = (await self.picker.page("/debug/console.json")).json()
        assert "unanswered" not in shown, shown
        counts = (one.split(".") for one in shown["decisions"]["next"].split(","))
        return Counter({pid: int(count) for pid, count in counts})

    async def both_decide(self) -> bool:
        """Send some, and see whether both workers had some of them."""
        before = await self.decided()
        await self.send(["again"] * CLIENTS)
        new = await self.decided() - before
        return len(new) == 2


@contextlib.asynccontextmanager
async def plane(folder: Path) -> AsyncIterator[Plane]:
    listen, admin = free_ports(2)
    async with engines() as fakes, picker_of_workers(folder, fakes, "--enable-debug-endpoints") as picker:
        config = EnvoyConfig(
            listen_port=listen,
            admin_port=admin,
            ext_proc_port=picker.grpc_port,
            eds_port=picker.control_port,
            access_log=str(folder / "access.log"),
        )
        async with running_envoy(config, folder, threads=2) as envoy:
            yield Plane(envoy, picker, fakes)


def unpicked(answers: list[httpx.Response]) -> list[httpx.Response]:
    """Those that Envoy sent somewhere by itself; all are answered."""
    assert [f"{one.status_code} {one.text[:200]}" for one in answers if one.status_code != 200] == []
    return [one for one in answers if names.DESTINATION not in one.json()["headers"]]


@pytest.mark.integration
@pytest.mark.deep
async def test_two_workers_share_what_a_real_envoy_asks_and_whatever_becomes_of_one_requests_go_on(
    tmp_path: Path,
) -> None:
    """1. Each thread of Envoy has a worker of its own. 2. One hangs: what waits for it goes on without the picker after
    Envoy's second. 3. One dies: the other serves. 4. Its successor gets its part back, and no request is lost by it."""
    async with plane(tmp_path) as made:
        await until(made.both_decide, "each thread of Envoy has a connection to another worker", 30)
        answers = await made.send([f"{number} is how this prompt begins" for number in range(CLIENTS)])
        assert unpicked(answers) == []
        connections = [
            sum(c.status == "ESTABLISHED" and c.laddr.port == made.picker.grpc_port for c in one.net_connections())
            for one in made.picker.workers
        ]
        assert connections == [1, 1], "one for each thread of Envoy"
        page = await made.picker.metrics()
        total = sum(value for name, value in page.items() if name.startswith("treeline_epp_decisions_total"))
        assert total == sum((await made.decided()).values()) == sum(len(fake.served) for fake in made.fakes)

        hung = made.picker.workers[0]
        hung.send_signal(signal.SIGSTOP)
        answers = []

        async def both_kinds() -> bool:  # one thread of Envoy may accept all connections of a burst
            answers.extend(await made.send(["hello"] * CLIENTS))
            return 0 < len(unpicked(answers)) < len(answers)

        try:
            await until(both_kinds, "those of the other worker are picked, those of this one are not")
        finally:
            hung.send_signal(signal.SIGCONT)
        assert min(one.elapsed.total_seconds() for one in unpicked(answers)) >= 0.9, "Envoy waits a second for a word"

        await until(made.both_decide, "it goes on", 30)
        made.picker.workers[0].kill()
        await until(lambda: "was ended by SIGKILL" in made.picker.log.read_text(), "it is noticed")
        assert unpicked(await made.send(["again"] * CLIENTS)) == [], "the other one serves"

        async def shared_again() -> bool:
            assert unpicked(await made.send(["again"] * CLIENTS)) == [], "also while a connection moves"
            page = await made.picker.metrics()
            return page["treeline_epp_workers"] == 2 and await made.both_decide()

        await until(shared_again, "its successor has its part", 60, made.picker.log.read_text)


@pytest.mark.integration
@pytest.mark.deep
async def test_whichever_worker_is_asked_a_session_stays_where_it_is(tmp_path: Path) -> None:
    async with plane(tmp_path) as made:
        await until(made.both_decide, "each thread of Envoy has a connection to another worker", 30)
        for session in "abc":

            async def together(session: str = session) -> bool:
                """Both workers have some of these prompts, which have nothing in common; one engine gets all."""
                before = await made.decided()
                prompts = [f"{time.monotonic_ns()} {number}" for number in range(8)]
                answers = await made.send(prompts, **{names.SESSION_ID: session})
                went = {one.json()["headers"][names.DESTINATION].partition(",")[0] for one in answers}
                return len(went) == 1 and len(await made.decided() - before) == 2

            await until(together, "both workers know where the session is")
