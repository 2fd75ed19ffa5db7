"""More adapters than the host has room for: those that nobody needs are read again when somebody does."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from support.adapter_engine import AdapterHarness, of
from support.runtime_engine import VOCAB, prompt, write_config
from treeline_runtime.messages import LoadAdapterReq
from treeline_runtime.models.adapters import WEIGHTS, Adapter, read_adapter
from treeline_runtime.scheduler import administration

Q = ("q_proj",)
PROMPT = prompt(7, 24)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model")


def size_of(model: Path, root: Path) -> int:
    """Return the bytes of an adapter of the queries, rank 8."""
    engine = AdapterHarness(model, root)
    return engine.residence.adapters[engine.added("one", 0, Q)].num_bytes


def engine_with_room(model: Path, tmp_path: Path, adapters: float, **settings: Any) -> AdapterHarness:
    room = int(adapters * size_of(model, tmp_path / "measured"))
    return AdapterHarness(model, tmp_path / "root", max_lora_memory=room, **settings)


@pytest.mark.parametrize("known", [40, pytest.param(1000, marks=pytest.mark.deep)])
def test_many_adapters_in_little_memory_answer_as_with_room_for_all(model: Path, tmp_path: Path, known: int) -> None:
    small, large = engine_with_room(model, tmp_path, 3.5), AdapterHarness(model, tmp_path / "root")
    digests = [small.added(str(i), i, Q) for i in range(known)]
    assert [large.added(str(i), i, Q) for i in range(known)] == digests
    assert len(small.residence.adapters) == 3
    rng = random.Random(0)
    for round_ in range(4):
        asked = {f"{round_} {i}": (prompt(i, 12), of(rng.choice(digests))) for i in range(20)}
        for engine in (small, large):
            for rid, (ids, namespace) in asked.items():
                engine.submit(rid, ids, namespace=namespace, max_new_tokens=3, seed=1, temperature=0.5)
            engine.run()
        assert {rid: small.tokens(rid) for rid in asked} == {rid: large.tokens(rid) for rid in asked}
    assert len(small.residence.adapters) <= 4
    for i in range(known):
        assert small.remove(str(i)).ok
    assert not small.residence.adapters
    assert not small.cache.slots.away
    assert not small.adapters._known


def test_the_adapter_that_was_asked_for_least_recently_leaves(model: Path, tmp_path: Path) -> None:
    engine = engine_with_room(model, tmp_path, 2)
    first, second = engine.added("first", 1, Q), engine.added("second", 2, Q)
    engine.generate("r", PROMPT, namespace=of(first))
    third = engine.added("third", 3, Q)
    assert engine.residence.adapters.keys() == {first, third}
    expected = engine.generate("again", PROMPT, namespace=of(second))
    assert engine.residence.adapters.keys() == {third, second}
    fresh = AdapterHarness(model, tmp_path / "root")
    fresh.added("second", 2, Q)
    assert fresh.generate("r", PROMPT, namespace=of(second)) == expected


def test_an_adapter_with_a_slot_is_computed_with_though_the_host_has_it_no_more(model: Path, tmp_path: Path) -> None:
    engine = engine_with_room(model, tmp_path, 1)
    digest = engine.added("a", 1, Q)
    engine.submit("runs", PROMPT, namespace=of(digest), max_new_tokens=20)
    engine.step()
    engine.added("b", 2, Q)
    assert digest in engine.cache.slots.away
    engine.submit("later", PROMPT, namespace=of(digest), max_new_tokens=20)
    engine.run()
    assert engine.tokens("later") == engine.tokens("runs")
    assert digest in engine.cache.slots.away, "nothing was read"


def test_steps_go_on_while_an_adapter_is_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, go_on = engine_with_room(model, tmp_path, 1), threading.Event()
    digest = engine.added("a", 1, Q)
    engine.added("b", 2, Q)

    def slow(*args: Any, **options: Any) -> Adapter:
        assert go_on.wait(60.0)
        return read_adapter(*args, **options)

    monkeypatch.setattr(administration, "read_adapter", slow)
    engine.submit("waits", PROMPT, namespace=of(digest))
    engine.submit("base", PROMPT, max_new_tokens=30)
    while "base" not in engine.outs or engine.last("base").finish is None:
        engine.step()
    assert "waits" not in engine.outs
    go_on.set()
    engine.run()
    assert len(engine.tokens("waits")) == 8


@pytest.mark.parametrize("how", ["others", "nonsense", "gone"])
def test_files_that_changed_end_the_requests_that_need_them_and_no_others(
    model: Path, tmp_path: Path, how: str
) -> None:
    engine = engine_with_room(model, tmp_path, 1)
    digest, other = engine.added("a", 1, Q), engine.added("b", 2, Q)
    if how == "others":
        engine.write("a", 3, Q)
    elif how == "nonsense":
        (engine.root / "a" / WEIGHTS).write_bytes(b"\0" * 100)
    else:
        (engine.root / "a" / WEIGHTS).unlink()
    engine.submit("one", PROMPT, namespace=of(digest))
    engine.submit("other", PROMPT, namespace=of(other))
    engine.run()
    engine.generate("late", PROMPT, namespace=of(digest))
    for rid in ("one", "late"):
        finish = engine.finish(rid)
        assert (finish.type, finish.status) == ("error", 500)
        assert "files have changed" in str(finish.message)
    assert len(engine.tokens("other")) == 8
    assert engine.load().digests == {"b": other}, "pickers send it no more requests"
    engine.write("a", 1, Q)
    assert engine.add("a").ok
    assert engine.load().digests == {"a": digest, "b": other}
    assert len(engine.generate("cured", PROMPT, namespace=of(digest))) == 8


@pytest.mark.parametrize("how", ["unloaded", "changed"])
@pytest.mark.parametrize("first", ["mine", "theirs"])
def test_an_adapter_that_another_name_shares_is_read_from_its_own_files(
    model: Path, tmp_path: Path, how: str, first: str
) -> None:
    engine = engine_with_room(model, tmp_path, 1)
    digest = ""
    for name in (first, "theirs" if first == "mine" else "mine"):
        digest = engine.added(name, 1, Q)
    if how == "unloaded":
        assert engine.remove("theirs").ok
    (engine.root / "theirs" / WEIGHTS).unlink()
    other = engine.added("other", 2, Q)
    assert digest in engine.cache.slots.away
    assert len(engine.generate("r", PROMPT, namespace=of(digest))) == 8
    assert engine.load().digests.items() >= {("mine", digest), ("other", other)}


def test_changed_files_can_be_loaded_after_an_unload(model: Path, tmp_path: Path) -> None:
    engine = engine_with_room(model, tmp_path, 1)
    digest = engine.added("a", 1, Q)
    engine.added("b", 2, Q)
    engine.write("a", 3, Q)
    engine.generate("fails", PROMPT, namespace=of(digest))
    assert engine.finish("fails").status == 500
    assert "unload it first" in str(engine.add("a").message)
    assert engine.remove("a").ok
    new = engine.added("a", 3, Q)
    assert len(engine.generate("new", PROMPT, namespace=of(new))) == 8


def test_adapters_that_are_loaded_again_take_no_more_memory_than_there_is(model: Path, tmp_path: Path) -> None:
    engine = engine_with_room(model, tmp_path, 1, max_loras=1)
    digests = {name: engine.added(name, seed, Q) for seed, name in enumerate("abcd")}
    for name, tokens in zip("dabc", (60, 2, 2, 2), strict=True):
        engine.submit(name, PROMPT, namespace=of(digests[name]), max_new_tokens=tokens)
    for name in "abc":
        assert engine.add(name).ok
        assert len(engine.residence.adapters) <= 2
    engine.run()
    assert [len(engine.tokens(name)) for name in "dabc"] == [60, 2, 2, 2]


def test_files_with_another_digest_are_forgotten_before_anybody_can_use_them(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1, Q)
    assert engine.remove("a").ok
    assert not engine.ask(LoadAdapterReq("wrong", "a", "a", "0" * 16)).ok
    assert engine.adapters.names == engine.residence.adapters == {}
    assert engine.ask(LoadAdapterReq("right", "a", "a", digest[:16])).ok


def test_an_adapter_larger_than_the_room_for_all_is_refused(model: Path, tmp_path: Path) -> None:
    engine = engine_with_room(model, tmp_path, 0.9)
    engine.write("a", 1, Q)
    assert "--max-lora-memory" in str(engine.add("a").message)


def test_an_adapter_that_is_unloaded_while_it_is_read_is_not_there_afterwards(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    engine.write("a", 1, Q)
    engine.inbox.append(LoadAdapterReq("load", "a", "a"))
    assert engine.remove("a").ok
    while not any(reply.id == "load" for reply in engine.replies):
        engine.step()
    assert "unloaded meanwhile" in str(next(reply.message for reply in engine.replies if reply.id == "load"))
    assert engine.adapters.names == engine.residence.adapters == {}
    assert engine.add("a").ok


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_ever_nor_gets_another_adapter(model: Path, tmp_path: Path, seed: int) -> None:
    """Requests, loads, unloads, aborts, retractions and failing launches in any order, with room for one or two."""
    rng = random.Random(seed)
    settings = {"max_loras": rng.choice([1, 2]), "prefix_cache": "off"}
    engine = engine_with_room(model, tmp_path, rng.choice([1, 2.5]), **settings)
    large = AdapterHarness(model, tmp_path / "root", prefix_cache="off")
    digests = {str(i): large.added(str(i), i, Q) for i in range(6)}
    asked: dict[str, tuple[list[int], str]] = {}
    for number in range(120):
        name, act = rng.choice(list(digests)), rng.random()
        if act < 0.2:
            assert engine.add(name).ok
        elif act < 0.25:
            engine.remove(name)
        elif act < 0.6 and name in engine.adapters.names:
            asked[str(number)] = rng.choices(range(VOCAB), k=9), digests[name]
            engine.submit(str(number), asked[str(number)][0], namespace=of(digests[name]), client=rng.choice("xy"))
        elif act < 0.65:
            engine.retract_one(rng)
        elif act < 0.7 and asked:
            engine.abort(rng.choice(list(asked)))
        else:
            engine.step()
    engine.run()
    whole = [rid for rid in asked if engine.finish(rid).type == "length"]
    assert len(whole) > 5
    assert all(engine.finish(rid).type in ("length", "abort") for rid in asked)
    for rid in whole:
        ids, digest = asked[rid]
        assert engine.tokens(rid) == large.generate(rid, ids, namespace=of(digest))
