"""The whole picker before engines that serve no tokenizer: one is given by flags, from a folder or from the Hub."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.epp_io import (
    FakeEngine,
    FakePublisher,
    RunningPicker,
    data_plane,
    running_picker,
    small_bundle,
    so,
    stored,
    until,
)
from support.fake_hub import FakeRepo, running_hub
from support.wire import wordpiece
from tokenizers import Tokenizer
from treeline_epp.index.index import Index
from treeline_epp.tokenizers import watch as tokenizer_watch
from treeline_epp.tokenizers.sources import FolderOrigin

TINY = Path(__file__).parents[3] / "models/tiny"


def as_vllm_writes_it(tokens: Sequence[int], size: int = 16, first_hash: int = 1 << 60) -> bytes:
    """A batch of vLLM's: arrays, one BlockStored of whole blocks, its hashes any numbers."""
    count = len(tokens) // size
    stored = [
        "BlockStored",
        [first_hash + i for i in range(count)],
        None,
        list(tokens[: count * size]),
        size,
        None,
        "GPU",
        None,
    ]
    return msgspec.msgpack.encode([time.time(), [stored], 0])


@contextlib.asynccontextmanager
async def foreign(*, models: tuple[str, ...] = ("tiny",)) -> AsyncIterator[tuple[FakeEngine, FakePublisher]]:
    """An engine that publishes and has no tokenizer to give."""
    engine, publisher = FakeEngine("e0", models=models), FakePublisher()
    engine.documents["/server_info"] = {"kv_events": publisher.kv_events()}
    await engine.start()
    try:
        yield engine, publisher
    finally:
        await engine.stop()
        publisher.stop()


async def routing(picker: RunningPicker, pool: str = "default") -> dict[str, Any]:
    found = (await picker.get("/endpoints")).json()["pools"].get(pool, {}).get("routing")
    return dict(found or {})


async def routed_by(picker: RunningPicker, way: str, reason: str = "") -> dict[str, Any]:
    """Wait until the pool is routed so."""
    last: dict[str, Any] = {}

    async def so() -> bool:
        last.update(await routing(picker))
        return (last.get("way"), last.get("reason")) == (way, reason)

    await until(so, f"routed by {way} {reason}", state=lambda: last)
    return last


async def unavailable(picker: RunningPicker, why: str) -> None:
    """First it is being fetched."""
    await until(lambda: so(routing(picker), lambda it: why in it.get("message", "")), f"that {why}")
    found = await routing(picker)
    assert (found["way"], found["reason"]) == ("history", "TokenizerUnavailable")


async def blocks(picker: RunningPicker) -> set[str]:
    return set((await picker.get("/debug/tree?pod=e0")).json()["blocks"])


async def test_a_folders_tokenizer_turns_a_vllm_shaped_engines_events_into_hits(tmp_path: Path) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    tokens = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(prompt).ids
    async with foreign() as (engine, publisher), foreign() as (other, idle):
        other.name = "e1"
        held_tokens = len(tokens) // 16 * 16
        for one in (engine, other):
            one.reply_headers = {
                "x-treeline-cached-tokens": str(held_tokens),
                "x-treeline-prompt-tokens": str(len(tokens)),
            }
        flags = ("--tokenizer", f"tiny={TINY}")
        async with data_plane(tmp_path, [engine, other], *flags) as plane:
            await routed_by(plane.picker, "events")
            await publisher.send(as_vllm_writes_it(tokens))
            await until(
                lambda: so(blocks(plane.picker), lambda held: len(held) == len(tokens) // 16),
                "every block is in the index",
            )
            assert (await plane.complete(prompt + "more")).status_code == 200
            assert (len(engine.served), len(other.served)) == (1, 0), "it goes where its prefix is"
            metrics = await plane.picker.metrics()
            hit = metrics["treeline_epp_predicted_hit_tokens_total"]
            assert held_tokens - 16 <= hit <= held_tokens, "and is known to be there, before any history"
            assert metrics['treeline_epp_endpoints_routed{pool="default",reason="",way="events"}'] == 2
            assert metrics['treeline_epp_blocks_skipped_total{reason="no_text"}'] == 0
        assert idle.seq == -1


async def test_with_a_tokenizer_that_loses_text_requests_go_by_history_and_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    wordpiece().save(str(folder / "tokenizer.json"))
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    async with foreign() as (engine, _), foreign() as (other, _):
        other.name = "e1"
        async with data_plane(tmp_path, [engine, other], "--tokenizer", f"tiny={folder}") as plane:
            found = await routed_by(plane.picker, "history", "TokenizerUnusable")
            assert "replaces unknown text" in found["message"]
            for _ in range(4):
                assert (await plane.complete(prompt + "more")).status_code == 200
            assert 4 in (len(engine.served), len(other.served)), "each goes where the first one went"


async def test_without_a_tokenizer_events_are_counted_and_requests_go_by_history(tmp_path: Path) -> None:
    async with foreign() as (engine, publisher), foreign() as (other, _):
        other.name = "e1"
        async with data_plane(tmp_path, [engine, other]) as plane:
            found = await routed_by(plane.picker, "history", "NoTokenizer")
            assert "--tokenizer MODEL=URI" in found["message"]
            await publisher.send(as_vllm_writes_it(range(64)))

            async def counted() -> bool:
                metrics = await plane.picker.metrics()
                return bool(metrics['treeline_epp_blocks_skipped_total{reason="no_text"}'] == 4)

            await until(counted, "the blocks are counted")
            assert await blocks(plane.picker) == set()
            chat = [{"role": "user", "content": "once " * 300}]
            for turn in range(5):
                body = {"model": "tiny", "messages": chat}
                assert (await plane.http.post("/v1/chat/completions", json=body)).status_code == 200
                chat += [{"role": "assistant", "content": "and?"}, {"role": "user", "content": f"then {turn}"}]
            assert sorted((len(engine.served), len(other.served))) == [0, 5], "the conversation stays"
            metrics = await plane.picker.metrics()
            name = 'treeline_epp_endpoints_routed{pool="default",reason="NoTokenizer",way="history"}'
            assert metrics[name] == 2


async def test_a_tokenizer_for_another_name_is_told_with_both_names() -> None:
    async with (
        foreign(models=("Qwen/Qwen3-4B", "more")) as (engine, _),
        running_picker(
            "--endpoint", f"e0={engine.address}", "--tokenizer", f"qwen={TINY}", "--tokenizer", f"b={TINY}"
        ) as picker,
    ):
        found = await routed_by(picker, "history", "NoTokenizer")
        assert "the engine serves Qwen/Qwen3-4B, more, and --tokenizer is given for qwen, b" in found["message"]


async def test_the_only_tokenizer_is_that_of_an_engine_whose_models_nobody_knows() -> None:
    async with foreign() as (engine, publisher):
        engine.statuses["/v1/models"] = 401
        engine.documents["/version"] = {"version": "0.33.0"}
        port = publisher.kv_events()["endpoint_port_base"]
        engine.documents["/kv_event_sources"] = {"0": {"endpoint": f"tcp://*:{port}"}}
        flags = ("--endpoint", f"e0={engine.address}", "--tokenizer")
        async with running_picker(*flags, f"qwen={TINY}") as picker:
            await routed_by(picker, "events")
        async with running_picker(*flags, f"qwen={TINY}", "--tokenizer", f"b={TINY}") as picker:
            found = await routed_by(picker, "history", "NoTokenizer")
            assert "serves unknown models, and --tokenizer is given for qwen, b" in found["message"]


async def test_a_folder_that_comes_later_and_then_changes_is_taken_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(FolderOrigin, "recheck_s", 0.05)
    respelled: list[str] = []
    respell = Index.respell
    monkeypatch.setattr(Index, "respell", lambda index, scope: (respelled.append(scope), respell(index, scope)))
    folder = tmp_path / "m"
    async with (
        foreign() as (engine, publisher),
        running_picker("--endpoint", f"e0={engine.address}", "--tokenizer", f"tiny={folder}") as picker,
    ):
        await unavailable(picker, f"there is no directory {folder}")
        await publisher.store(stored(range(40)))
        (tmp_path / "new").mkdir()
        (tmp_path / "new/tokenizer.json").write_text(small_bundle().tokenizer_json)
        (tmp_path / "new").rename(folder)
        await routed_by(picker, "events")

        async def held() -> bool:
            return len(await blocks(picker)) == 2

        await until(held, "what was published before is replayed")
        assert respelled == [], "nothing was keyed before"
        first = len(publisher.asked)
        (folder / "tokenizer.json").write_text(small_bundle().tokenizer_json + "\n")
        await until(lambda: len(publisher.asked) > first, "it is another tokenizer: all is asked for anew")
        await until(held, "and known again")
        assert respelled == ["tiny"]
        (folder / "tokenizer.json").write_text("{")
        await until(lambda: "stays unchanged" in caplog.text, "it is said that the file is broken")
        assert (await routing(picker))["way"] == "events"
        assert await held()


async def test_a_hub_that_is_away_holds_nothing_up_and_is_taken_up_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"tokenizer.json": small_bundle().tokenizer_json.encode()}
    cache = tmp_path / "cache"
    with running_hub(words=FakeRepo(files, gated=True, token="hf_right")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        async with foreign() as (engine, _):
            flags = ["--endpoint", f"e0={engine.address}", "--tokenizer-cache", str(cache)]
            flags += ["--tokenizer", "tiny=hf://org/words"]
            async with running_picker(*flags) as picker:
                await unavailable(picker, "is gated: accept its terms")
                monkeypatch.setenv("HF_TOKEN", "hf_right")
                await routed_by(picker, "events")
            hub.status = 503
            async with running_picker(*flags) as picker:
                await routed_by(picker, "events")  # from the cache
            shutil.rmtree(cache)
            async with running_picker(*flags) as picker:
                await unavailable(picker, "answers 503")


async def test_an_engines_own_tokenizer_goes_first_unless_a_flag_names_a_model_of_its(tmp_path: Path) -> None:
    own = {"tokenizer_fingerprint": small_bundle().fingerprint}
    async with foreign(models=("base", "adapter")) as (engine, publisher):
        engine.documents["/server_info"] = {"kv_events": publisher.kv_events(), **own}
        engine.documents["/treeline/tokenizer"] = small_bundle().to_json()
        where = ("--endpoint", f"e0={engine.address}")
        for name, asks in (("other", True), ("adapter", False)):
            engine.seen.clear()
            async with running_picker(*where, "--tokenizer", f"{name}={TINY}") as picker:
                await routed_by(picker, "events")
            assert ("/treeline/tokenizer" in [seen.path for seen in engine.seen]) == asks
