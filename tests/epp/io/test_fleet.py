"""The whole picker without Envoy: engines with publishers, discovery, readiness, and the contents of the tree."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from support.epp_io import (
    FakeEngine,
    FakePublisher,
    RunningPicker,
    equal,
    running_picker,
    small_bundle,
    so,
    stored,
    until,
)
from support.ports import free_base
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad

LIVE = ("live", "checking")


@dataclass
class Runtime:
    """A fake Treeline runtime: HTTP engine and publisher."""

    engine: FakeEngine
    publisher: FakePublisher

    @property
    def flags(self) -> tuple[str, str]:
        return "--endpoint", f"{self.engine.name}={self.engine.address}"

    def describe(self) -> None:
        """Update the engine's pages to the current epoch and tokenizer."""
        self.engine.documents |= {
            "/server_info": {
                "kv_events": self.publisher.kv_events(),
                "epoch": self.publisher.epoch,
                "tokenizer_fingerprint": small_bundle().fingerprint,
            },
            "/treeline/tokenizer": small_bundle().to_json(),
        }

    async def restart(self, epoch: int) -> None:
        """Start another process on the same ports, with an empty cache."""
        await self.engine.stop()
        self.publisher.stop()
        self.publisher = FakePublisher(epoch=epoch, ports=self.publisher.ports)
        self.describe()
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        self.publisher.stop()


@contextlib.asynccontextmanager
async def runtimes(count: int = 1) -> AsyncIterator[list[Runtime]]:
    made = []
    for i in range(count):
        runtime = Runtime(FakeEngine(f"e{i}"), FakePublisher(epoch=i + 1))
        runtime.describe()
        await runtime.engine.start()
        made.append(runtime)
    try:
        yield made
    finally:
        for runtime in made:
            await runtime.stop()


async def holds(picker: RunningPicker, name: str) -> set[int]:
    """Return the blocks that the picker believes an endpoint holds."""
    page = (await picker.get(f"/debug/tree?pod={name}")).json()
    return {int(block) for block in page["blocks"]}


async def endpoint(picker: RunningPicker, name: str = "e0") -> dict[str, Any]:
    (found,) = [e for e in (await picker.get("/debug/endpoints")).json()["endpoints"] if e["name"] == name]
    return dict(found)


async def test_a_ready_picker_knows_the_runtimes_caches() -> None:
    async with runtimes(2) as made:
        first = stored(range(64))
        await made[0].publisher.store(first)
        await made[1].publisher.store(first, stored(range(100, 132), parent=first))
        async with running_picker(*made[0].flags, *made[1].flags) as picker:
            for runtime in made:
                name = runtime.engine.name
                expected = {h for block in runtime.publisher.blocks for h in block.block_hashes}
                assert await holds(picker, name) == expected
                assert (await endpoint(picker, name))["subscription"] in LIVE
        asked = [s.path for r in made for s in r.engine.seen]
        assert asked.count("/treeline/tokenizer") == 1  # equal tokenizers are fetched once


async def test_later_blocks_arrive_and_lost_ones_are_noticed() -> None:
    async with runtimes() as (runtime,), running_picker(*runtime.flags) as picker:
        publisher = runtime.publisher
        publisher.drop = {1, 4}
        last = None
        for i in range(5):
            last = stored(range(32 * i, 32 * i + 32), parent=last)
            await publisher.store(last)
        newest = TreelineLoad(epoch=publisher.epoch, seq=publisher.seq)
        expected = {h for block in publisher.blocks for h in block.block_hashes}

        async def converged() -> bool:
            await publisher.report(TREELINE_LOAD_TOPIC, newest)
            return await holds(picker, "e0") == expected

        await until(converged, "the tree equals the cache")


async def test_a_restarted_engine_holds_nothing_until_it_reports() -> None:
    async with runtimes() as (runtime,), running_picker(*runtime.flags) as picker:
        block = stored(range(32))
        await runtime.publisher.store(block)
        await until(lambda: equal(holds(picker, "e0"), set(block.block_hashes)), "the block is known")
        await runtime.restart(epoch=99)

        await until(lambda: equal(holds(picker, "e0"), set()), "the old cache is not credited")

        async def back() -> bool:
            state = await endpoint(picker)
            return state["selectable"] and state["subscription"] in LIVE

        await until(back, "the new process is in use")
        other = stored(range(500, 532))
        await runtime.publisher.store(other)
        await until(lambda: equal(holds(picker, "e0"), set(other.block_hashes)), "its own blocks are known")


async def test_a_load_report_with_a_new_adapter_triggers_a_probe() -> None:
    async with runtimes() as (runtime,), running_picker(*runtime.flags) as picker:
        runtime.engine.models = ("tiny", "lora")

        async def listed() -> bool:
            await runtime.publisher.report(TREELINE_LOAD_TOPIC, TreelineLoad(epoch=1, seq=0, adapters=["lora"]))
            return "lora" in (await picker.get("/endpoints")).json()["pools"]["default"]["models"]

        await until(listed, "it was asked")


async def test_a_load_report_of_draining_counts_at_once() -> None:
    async with runtimes() as (runtime,), running_picker(*runtime.flags) as picker:

        async def told() -> bool:
            await runtime.publisher.report(TREELINE_LOAD_TOPIC, TreelineLoad(epoch=1, seq=0, draining=True))
            state = await endpoint(picker)
            return state["state"] == "draining" and not state["selectable"]

        await until(told, "it drains")


async def test_each_rank_of_a_runtime_is_an_endpoint_with_its_own_events_and_load() -> None:
    async with runtimes() as (runtime,):
        runtime.publisher.stop()
        bases = [free_base(2) for _ in range(3)]
        ranks = [FakePublisher(ports=(bases[0] + rank, bases[1] + rank, bases[2] + rank)) for rank in range(2)]
        about = runtime.engine.documents["/server_info"]
        about["kv_events"] = ranks[0].kv_events() | {"dp_size": 2}
        block = stored(range(64))
        await ranks[1].store(block)
        async with running_picker(*runtime.flags) as picker:
            assert (await picker.get("/debug/tree")).json()["pods"] == ["e0", "e0/1"]
            assert await holds(picker, "e0") == set()
            assert await holds(picker, "e0/1") == set(block.block_hashes)

            async def told(*loads: TreelineLoad) -> dict[str, Any]:
                for rank, load in zip(ranks, loads, strict=True):
                    await rank.report(TREELINE_LOAD_TOPIC, load)
                return dict((await picker.get("/endpoints")).json()["pools"]["default"]["endpoints"][0])

            busy, idle = TreelineLoad(epoch=1, seq=0, in_flight=3), TreelineLoad(epoch=1, seq=0, in_flight=2)
            await until(lambda: so(told(busy, idle), lambda it: it["in_flight"] == 5), "their requests add up")
            draining = TreelineLoad(epoch=1, seq=0, draining=True)
            await until(lambda: so(told(idle, draining), lambda it: it["draining"]), "one of them drains")
            await until(lambda: so(told(idle, idle), lambda it: it["ready"]), "none drains")

            about.update({"kv_events": ranks[0].kv_events(), "epoch": 2})

            async def pods() -> list[str]:
                await told(idle, TreelineLoad(epoch=2, seq=0, draining=True))  # a change makes the picker ask
                return list((await picker.get("/debug/tree")).json()["pods"])

            await until(lambda: equal(pods(), ["e0"]), "the new process has one rank")
        for rank in ranks:
            rank.stop()


async def test_the_list_of_endpoints_shows_their_load_and_their_cache() -> None:
    async with runtimes() as (runtime,), running_picker(*runtime.flags) as picker:
        await runtime.publisher.store(stored(range(100, 132)))

        async def told() -> bool:
            await runtime.publisher.report(TREELINE_LOAD_TOPIC, TreelineLoad(epoch=1, seq=0, in_flight=3))
            page = (await picker.get("/endpoints")).json()
            (it,) = page["pools"]["default"]["endpoints"]
            return it["in_flight"] == 3 and it["cached_tokens"] == 32

        await until(told, "its requests and its cache are told")


async def test_the_list_of_endpoints_tells_why_one_is_not_ready_and_whether_waiting_helps() -> None:
    engine = FakeEngine("e0")
    await engine.start()
    engine.missing = {"/v1/models"}
    async with running_picker("--endpoint", f"e0={engine.address}") as picker:

        async def told(ready: bool, problem: str | None, lasting: bool) -> bool:
            (it,) = (await picker.get("/endpoints")).json()["pools"]["default"]["endpoints"]
            return (it["ready"], it["problem"], it["lasting"]) == (ready, problem, lasting)

        url = f"http://{engine.address}"
        await until(lambda: told(False, f"{url} has no /v1/models", True), "another kind of server is told")
        engine.missing = set()
        await until(lambda: told(True, None, False), "it is ready after all")
        engine.ready = False
        await until(lambda: told(False, "its health is not answered 200", False), "it drains")
        await engine.stop()
        await until(lambda: told(False, f"{url}: Connection refused", False), "it is gone")


async def test_unresponsive_engines_do_not_block_readiness() -> None:
    silent = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with running_picker("--endpoint", f"silent=127.0.0.1:{port}"):  # which waits until it is ready
        pass
    silent.close()


async def test_missing_keys_are_reported_and_do_not_block_readiness() -> None:
    async with runtimes() as (runtime,):
        info = runtime.engine.documents["/server_info"]
        info["kv_events"] = {**info["kv_events"], "curve": True}
        async with running_picker(*runtime.flags) as picker:
            state = await endpoint(picker)
            assert (state["selectable"], state["subscription"]) == (True, None)


async def test_an_engine_that_names_another_host_is_followed_at_its_own_address_and_counted() -> None:
    async with runtimes() as (runtime,):
        info = runtime.engine.documents["/server_info"]
        info["kv_events"] = {**info["kv_events"], "endpoint_host": "192.0.2.1"}
        async with running_picker(*runtime.flags) as picker:
            await runtime.publisher.store(stored(range(32)))
            metric = "treeline_epp_endpoints_naming_others"
            metrics = await until(lambda: picker_sees(picker, "treeline_epp_tree_blocks", 2), "the blocks to arrive")
            assert metrics[metric] == 1


async def picker_sees(picker: RunningPicker, metric: str, value: float) -> dict[str, float] | None:
    metrics = await picker.metrics()
    return metrics if metrics.get(metric) == value else None
