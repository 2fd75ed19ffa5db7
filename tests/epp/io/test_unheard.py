"""Engines that name their publishers although no events arrive: how their pools are routed, and the reason given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import RunningPicker, running_picker, stored, until
from support.foreign_engine import ForeignEngine, foreign_engine, tokenizer_flags
from treeline_epp import way_judge
from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod
from treeline_epp.kvevents import hearing


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "UNREACHED_S", 0.2)
    monkeypatch.setattr(hearing, "STEADY_S", 0.2)
    monkeypatch.setattr(way_judge, "_EVERY_S", 0.05)


async def routed(picker: RunningPicker, way: str, reason: str = "") -> str:
    """Wait until the pool is routed in this way, and return its message."""
    last: dict[str, Any] = {}

    async def so() -> bool:
        last.clear()
        last.update((await picker.get("/endpoints")).json()["pools"]["default"]["routing"] or {})
        return (last.get("way"), last.get("reason")) == (way, reason)

    await until(so, f"routed by {way} {reason}", state=lambda: last)
    return str(last["message"])


def connects(vllm: ForeignEngine) -> None:
    vllm.http.documents["/kv_event_sources"]["0"]["endpoint"] = f"tcp://0.0.0.0:{vllm.events_base}"


def closed(_: ForeignEngine) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "why"),
    [(closed, "nothing listens there, or a NetworkPolicy closes the port"), (connects, "write tcp://*:PORT")],
)
async def test_without_a_publisher_requests_are_routed_by_history(
    tmp_path: Path, change: Callable[[ForeignEngine], None], why: str
) -> None:
    async with foreign_engine("vllm", 1) as vllm:
        vllm.says_as_vllm()
        change(vllm)
        vllm.ranks[0].stop()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path), ready=False) as picker:
            message = await routed(picker, "history", "EventsUnreachable")
            assert message.startswith(f"cannot connect to tcp://127.0.0.1:{vllm.events_base}: ")
            assert why in message
            counted = 'treeline_epp_endpoints_routed{pool="default",reason="EventsUnreachable",way="history"}'
            assert (await picker.metrics())[counted] == 1
            (found,) = (await picker.get("/debug/endpoints")).json()["endpoints"]
            assert (found["selectable"], found["publishers"][0]["state"]) == (True, "disconnected")
            vllm.restart()
            assert await routed(picker, "events") == ""


async def test_a_lost_publisher_is_noticed_and_predictions_last_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods: list[Pod] = []
    add = Index.add_pod

    def recorded(*args: Any) -> Pod:
        pods.append(add(*args))
        return pods[-1]

    monkeypatch.setattr(Index, "add_pod", recorded)
    async with foreign_engine("vllm", 2) as vllm:
        vllm.says_as_vllm()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            await routed(picker, "events")
            await vllm.ranks[1].subscribed()
            await vllm.ranks[1].store(stored(range(32)))
            await until(lambda: asyncio.sleep(0, pods[1].precise), "the event to come")
            vllm.ranks[1].stop()
            message = await routed(picker, "history", "EventsUnreachable")
            assert message.startswith(f"cannot connect to tcp://127.0.0.1:{vllm.events_base + 1}: ")
            assert [pod.precise for pod in pods] == [False, False], "history alone tells what it holds"


async def test_without_events_for_prompts_requests_are_routed_by_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "SILENT_PROMPTS", 0)
    monkeypatch.setattr(hearing, "SILENT_TOKENS", 0)
    async with foreign_engine("vllm", 1, topic="kv@x") as vllm:
        vllm.says_as_vllm()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            message = await routed(picker, "history", "NothingHeard")
            assert f"connected to tcp://127.0.0.1:{vllm.events_base}, but no events came" in message
            assert "kv@x" in message
            await vllm.ranks[0].subscribed()
            await vllm.ranks[0].store(stored(range(32)))
            await routed(picker, "events")


async def test_with_unreadable_events_requests_are_routed_by_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unread = {"type": "BlockStored", "block_hashes": ["a text"], "token_ids": [], "block_size": 16}
    async with foreign_engine("vllm", 1) as vllm:
        vllm.says_as_vllm()
        async with running_picker(*vllm.flags, *tokenizer_flags(tmp_path)) as picker:
            await routed(picker, "events")
            await vllm.ranks[0].subscribed()
            for _ in range(hearing.UNREAD_EVENTS - 1):
                await vllm.ranks[0].publish([unread])
            await vllm.ranks[0].publish({"not": "events"})  # type: ignore[arg-type]
            message = await routed(picker, "history", "EventsUnreadable")
            assert f"most events of tcp://127.0.0.1:{vllm.events_base} are not understood" in message
            assert "(bad_hash 15, undecodable 1)" in message
            assert "EventsUnreadable" in caplog.text
            for at in range(hearing.UNREAD_EVENTS):
                await vllm.ranks[0].store(stored(range(16 * at, 16 * at + 16)))
            assert await routed(picker, "events") == ""
