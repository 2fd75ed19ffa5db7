"""The whole picker with unmodified foreign engines: it finds their ranks' publishers and follows them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from support.epp_io import RunningPicker, running_picker, so, stored, until
from support.foreign_engine import foreign_engine, tokenizer_flags
from support.ports import free_base
from treeline_wire.events import BlockStored
from treeline_wire.load import LOAD_TOPIC, LoadStat
from treeline_wire.load import encode as encode_load

SHARED = stored(range(64))
OWN = stored(range(100, 132))


async def described(picker: RunningPicker, name: str) -> dict[str, Any]:
    (found,) = [e for e in (await picker.get("/debug/endpoints")).json()["endpoints"] if e["name"] == name]
    return dict(found)


async def live(picker: RunningPicker, name: str, ranks: int = 2) -> dict[str, Any]:
    """Return the endpoint, once all its ranks are followed."""

    async def followed() -> dict[str, Any] | None:
        for found in (await picker.get("/debug/endpoints")).json()["endpoints"]:  # a changed one is away for a moment
            if found["name"] == name and [one["state"] for one in found["publishers"]] == ["live"] * ranks:
                return dict(found)
        return None

    return dict(await until(followed, f"{ranks} ranks to be followed", state=lambda: None))


async def comes_to_hold(picker: RunningPicker, name: str, *blocks: BlockStored | Iterable[int]) -> None:
    wanted: set[int] = set()
    for block in blocks:
        wanted.update(block.block_hashes if isinstance(block, BlockStored) else block)

    async def equal() -> bool:
        return {int(b) for b in (await picker.get(f"/debug/tree?pod={name}")).json()["blocks"]} == wanted

    await until(equal, f"{name} to hold {len(wanted)} blocks")


async def test_vllms_ranks_are_found_by_its_report_and_kept_apart(tmp_path: Path) -> None:
    async with foreign_engine("vllm", topic="kv@pod@tiny") as vllm:
        vllm.says_as_vllm()
        first, second = vllm.ranks
        await first.store(SHARED)  # before anybody listens: only the replay has it
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            found = await live(picker, "vllm")
            assert (found["engine"], found["no_events"], found["unfollowed"]) == ("vllm", None, False)
            assert [one["peer"] for one in found["publishers"]] == ["foreign", "foreign"]
            await comes_to_hold(picker, "vllm", SHARED)
            await second.store(SHARED, OWN)
            await comes_to_hold(picker, "vllm/1", SHARED, OWN)
            await first.remove(SHARED.block_hashes)
            await first.store(stored(range(200, 216)))
            await comes_to_hold(picker, "vllm", stored(range(200, 216)))
            await comes_to_hold(picker, "vllm/1", SHARED, OWN)
            await second.clear()
            await comes_to_hold(picker, "vllm/1")
            metrics = await picker.metrics()
            assert metrics['treeline_epp_engines{engine="vllm",events="followed"}'] == 1
            assert metrics['treeline_epp_kv_subscriptions{state="live"}'] == 2
        assert vllm.invalid == [], "no hello"


async def test_events_of_another_topic_are_ignored(tmp_path: Path) -> None:
    async with foreign_engine("vllm", 1, topic="kv@a") as vllm:
        vllm.says_as_vllm()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            await live(picker, "vllm", 1)
            assert await vllm.ranks[0].subscribed() == b"kv@a"
            await vllm.ranks[0].publish([{"type": "AllBlocksCleared"}], topic=b"load")
            await vllm.ranks[0].store(SHARED)  # a gap on the topic: the replay has what was not heard
            await comes_to_hold(picker, "vllm", SHARED)


async def test_a_restart_behind_the_same_ports_is_detected(tmp_path: Path) -> None:
    async with foreign_engine("vllm") as vllm:
        vllm.says_as_vllm()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            await live(picker, "vllm")
            for rank in vllm.ranks:
                for seed in range(5):
                    await rank.store(stored(range(seed, seed + 32)))
            for name in ("vllm", "vllm/1"):
                await comes_to_hold(picker, name, *(stored(range(seed, seed + 32)) for seed in range(5)))
            vllm.restart()
            await vllm.ranks[1].store(OWN)
            await comes_to_hold(picker, "vllm/1", OWN)
            await comes_to_hold(picker, "vllm")


async def test_a_restart_without_a_replay_socket_is_detected_by_the_next_event(tmp_path: Path) -> None:
    async with foreign_engine("vllm", 1, replays=False) as vllm:
        vllm.says_as_vllm()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            await live(picker, "vllm", 1)
            await vllm.ranks[0].subscribed()
            await vllm.ranks[0].store(SHARED)
            await comes_to_hold(picker, "vllm", SHARED)
            vllm.restart()
            await vllm.ranks[0].subscribed()
            await vllm.ranks[0].store(OWN)
            await comes_to_hold(picker, "vllm", OWN)


async def test_an_older_vllms_publisher_comes_from_the_endpoints_file(tmp_path: Path) -> None:
    async with foreign_engine("vllm", old=True) as vllm:
        file = tmp_path / "endpoints.yaml"
        entry = f"name: vllm, address: '{vllm.http.address}'"
        file.write_text(f"endpoints: [{{{entry}}}]")
        async with running_picker("--endpoints-file", str(file), *tokenizer_flags(tmp_path)) as picker:
            found = await described(picker, "vllm")
            assert found["publishers"] == []
            assert "0.32" in found["no_events"]
            assert (await picker.metrics())['treeline_epp_engines{engine="vllm",events="none"}'] == 1
            await vllm.ranks[1].store(SHARED)
            events = f"{{port: {vllm.events_base}, replay_port: {vllm.replay_base}, ranks: 2}}"
            file.write_text(f"endpoints: [{{{entry}, kv_events: {events}}}]")
            await live(picker, "vllm")
            await comes_to_hold(picker, "vllm", SHARED)
            await vllm.ranks[0].store(OWN)
            await vllm.ranks[1].remove(SHARED.block_hashes[2:])
            await comes_to_hold(picker, "vllm", SHARED.block_hashes[:2], OWN)
        assert vllm.invalid == []


async def test_sglangs_ranks_are_counted_from_its_base_ports_and_their_loads_add_up(tmp_path: Path) -> None:
    loads = free_base(2)
    context = zmq.asyncio.Context()
    sockets = [context.socket(zmq.XPUB) for _ in range(2)]
    for rank, sock in enumerate(sockets):
        sock.bind(f"tcp://127.0.0.1:{loads + rank}")
    async with foreign_engine("sglang") as sglang:
        sglang.says_as_sglang(loads)
        async with running_picker(*sglang.flags, *tokenizer_flags(tmp_path)) as picker:
            await live(picker, "sglang")
            await sglang.ranks[0].store(SHARED)
            await sglang.ranks[1].store(OWN)
            await comes_to_hold(picker, "sglang", SHARED, OWN)

            async def added() -> bool:
                for rank, sock in enumerate(sockets):
                    report = encode_load(LoadStat(num_running=2 + rank, num_waiting=1, attn_dp_rank=rank))
                    await sock.send_multipart([LOAD_TOPIC, bytes(8), report])
                (it,) = (await picker.get("/endpoints")).json()["pools"]["default"]["endpoints"]
                return bool(it["in_flight"] == 7 and it["cached_tokens"] == 96)

            await until(added, "both ranks' load to be told")
        assert sglang.invalid == []
    context.destroy(linger=0)


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
async def test_an_engine_without_events_is_reported_and_delays_nothing(owner: str) -> None:
    async with foreign_engine(owner) as engine:
        if owner == "vllm":
            engine.ranks, gone = [], engine.ranks
            engine.says_as_vllm()
            engine.ranks = gone
        async with running_picker(*engine.flags) as picker:
            found = await described(picker, owner)
            assert (found["selectable"], found["publishers"], found["subscription"]) == (True, [], None)
            assert "--kv-events-config" in found["no_events"]


async def test_another_engine_may_return_at_an_address() -> None:
    async with foreign_engine("vllm", 1) as engine:
        engine.says_as_vllm()
        async with running_picker(*engine.flags) as picker:
            await live(picker, "vllm", 1)
            await engine.http.stop()
            await until(lambda: so(described(picker, "vllm"), lambda it: it["state"] == "down"), "it to be down")
            now = engine.http
            now.missing.add("/kv_event_sources")
            now.documents["/v1/models"] = {"data": [{"id": "tiny", "owned_by": "sglang"}]}
            engine.says_as_sglang()
            await now.start()

            async def other() -> bool:
                found = await described(picker, "vllm")
                return found["engine"] == "sglang" and [p["state"] for p in found["publishers"]] == ["live"]

            await until(other, "it to be known as another")
