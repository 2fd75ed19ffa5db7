"""Requests with adapters: mixed with others, in the cache, while adapters come and go."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_engine import AdapterHarness, of
from support.adapters import ATTENTION, write_adapter
from support.runtime_engine import VOCAB, Harness, write_config
from support.runtime_graphs import ComputedGraphs
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.models.adapters import WEIGHTS
from treeline_runtime.models.config import ModelError
from treeline_runtime.scheduler import adapters
from treeline_runtime.scheduler.graphs import kinds_up_to
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.prefill import MOST_PASSED
from treeline_runtime.scheduler.slots import MOST_PASSING

PROMPT = list(range(3, 40))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model")


def prompt(seed: int, length: int = 24) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mixed_chunk": True, "chunked_prefill_size": 16},
        {"prefix_cache": "off"},
        {"speculative_algorithm": "NGRAM"},
    ],
)
def test_a_mixed_batch_answers_as_each_request_alone(
    model: Path, tmp_path: Path, settings: dict[str, Any], captured: bool
) -> None:
    alone, together = (AdapterHarness(model, tmp_path / "root", max_loras=4, **settings) for _ in range(2))
    digests: list[str | None] = [None]
    graphs = ComputedGraphs(together.executor, 64)
    if captured:
        together.executor._graphs = graphs  # type: ignore[assignment]
    for engine in (alone, together):
        digests = [None, engine.added("a", 1), engine.added("b", 2, rank=64), engine.added("c", 3, ATTENTION[:1])]
    expected = {}
    for seed in range(12):
        rid, of_one = f"r{seed}", {"namespace": of(digests[seed % 4]), "max_new_tokens": 3 + seed}
        expected[rid] = alone.generate(rid, prompt(seed), **of_one)
        together.submit(rid, prompt(seed), **of_one)
    together.run()
    assert {rid: together.tokens(rid) for rid in expected} == expected
    assert (graphs.with_adapters > 0) is captured
    # the same prompt, by four weights
    answers = [tuple(alone.generate(f"p{i}", PROMPT, namespace=of(digest))) for i, digest in enumerate(digests)]
    assert len(set(answers)) == 4


@pytest.mark.parametrize("largest", [1, 24, 40])
def test_engines_that_share_experts_agree_on_a_size_that_is_captured_with_adapters_and_without(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    executor = AdapterHarness(model, tmp_path / "root").executor
    kinds = kinds_up_to(largest, adapts=True)
    monkeypatch.setattr(executor._graphs, "_captured", dict.fromkeys(kinds))
    monkeypatch.setattr(executor._graphs, "largest", largest)
    monkeypatch.setattr(executor, "_peers", object())
    for n, m in itertools.product(range(1, largest + 1), repeat=2):
        rows, others = [*range(n)], [*range(m)]
        plain = StepPlan(rows, rows, [row + 1 for row in rows], decodes=True, sampling=rows)
        adapts = StepPlan(others, others, [row + 1 for row in others], decodes=True, sampling=others, adapters=[0] * m)
        asked = [executor._how(plan) for plan in (plain, adapts)]
        assert {launch.mode for launch in asked} == {"decode graph"}
        size = max(launch.bucket for launch in asked)
        assert {(size, False), (size, True)} <= set(kinds)


def test_answers_of_the_model_itself_are_those_without_any_adapter(model: Path, tmp_path: Path) -> None:
    plain, beside = Harness(model), AdapterHarness(model, tmp_path / "root")
    digest = beside.added("a", 1)
    for i in range(4):
        plain.submit(f"{i}", prompt(i), return_logprob=True, top_logprobs_num=4)
        beside.submit(f"{i}", prompt(i), return_logprob=True, top_logprobs_num=4)
        beside.submit(f"a{i}", prompt(i), namespace=of(digest))
    plain.run()
    beside.run()
    for i in range(4):
        told, expected = ([out.output_token_logprobs for out in one.outs[f"{i}"]] for one in (beside, plain))
        assert beside.tokens(f"{i}") == plain.tokens(f"{i}")
        flat = [[value for part in parts for value, _ in part or []] for parts in (told, expected)]
        assert flat[0] == pytest.approx(flat[1], abs=1e-5)


def test_steps_without_adapters_have_no_word_of_them(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest, plans, launch = engine.added("a", 1), [], engine.executor.launch
    monkeypatch.setattr(engine.executor, "launch", lambda plan: plans.append(plan) or launch(plan))
    engine.generate("base", PROMPT)
    assert all(plan.adapters == [] and plan.slots == {} for plan in plans)
    plans.clear()
    engine.generate("a", PROMPT, namespace=of(digest))
    assert [plan.slots for plan in plans] == [{0: digest}] + [{}] * (len(plans) - 1)
    assert all(plan.adapters == [0] for plan in plans)


def test_a_failed_launch_puts_the_adapters_there_again(model: Path, tmp_path: Path) -> None:
    engine, calm = (AdapterHarness(model, tmp_path / "root", max_loras=4) for _ in range(2))
    for one in (engine, calm):
        digests = [None, one.added("a", 1), one.added("b", 2)]
        for i in range(9):
            one.submit(f"{i}", prompt(i), namespace=of(digests[i % 3]), max_new_tokens=6)
    calm.run()
    engine.run_with_failing_launches()
    for i in range(9):
        assert engine.tokens(f"{i}") == calm.tokens(f"{i}")


# ---- the cache --------------------------------------------------------------------------------------------------


def test_pages_are_shared_within_an_adapter_and_never_across(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    one, other = engine.added("a", 1), engine.added("b", 2)
    for name, namespace in (("base", None), ("one", of(one)), ("other", of(other)), ("salted", of(one, "s"))):
        engine.generate(f"first {name}", PROMPT, namespace=namespace)
        assert engine.outs[f"first {name}"][-1].cached_tokens == 0
        engine.generate(f"second {name}", PROMPT, namespace=namespace)
        assert engine.outs[f"second {name}"][-1].cached_tokens > 0


def test_a_reload_under_the_same_name_meets_no_old_pages(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    old = engine.added("a", 1)
    before = engine.generate("old", PROMPT, namespace=of(old))
    assert engine.remove("a").ok
    new = engine.added("a", 2)
    assert new != old
    after = engine.generate("new", PROMPT, namespace=of(new))
    assert engine.outs["new"][-1].cached_tokens == 0
    assert after != before
    fresh = AdapterHarness(model, tmp_path / "root")
    assert fresh.add("a").ok
    assert fresh.generate("new", PROMPT, namespace=of(new)) == after


def test_what_comes_back_finds_its_pages(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1)
    engine.generate("before", PROMPT, namespace=of(digest))
    assert engine.remove("a").ok
    assert engine.added("b", 1) == digest, "equal files, another name"
    engine.generate("after", PROMPT, namespace=of(digest))
    assert engine.outs["after"][-1].cached_tokens > 0


def test_events_name_the_digest(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1)
    engine.generate("r", PROMPT, namespace=of(digest))
    stored = [event for update in engine.updates for event in update.events if hasattr(event, "token_ids")]
    assert {event.namespace for event in stored} == {of(digest)}


def test_audits_compute_with_the_adapter(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", cache_audit=1.0)
    digest = engine.added("a", 1)
    engine.added("b", 2)
    for i in range(4):
        engine.generate(f"{i}", PROMPT, namespace=of(digest))
    counts = engine.audits.counts["tree"]
    assert (counts.audited, counts.diverged) == (3, 0)


# ---- more adapters than slots -----------------------------------------------------------------------------------


def test_adapters_take_turns_in_a_single_slot(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", max_loras=1)
    digests = [engine.added(f"{i}", i, rank=8 * (i + 1)) for i in range(4)]
    expected = [engine.generate(f"alone {i}", prompt(i), namespace=of(digests[i % 4])) for i in range(12)]
    engine.cache.wipe()
    for i in range(12):
        engine.submit(f"{i}", prompt(i), namespace=of(digests[i % 4]))
    engine.run()
    assert [engine.tokens(f"{i}") for i in range(12)] == expected


def test_a_request_for_a_rare_adapter_is_passed_a_bounded_number_of_times(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", max_loras=1, max_running_requests=4)
    popular, rare = engine.added("popular", 1), engine.added("rare", 2)
    for i in range(4):
        engine.submit(f"p{i}", prompt(i), namespace=of(popular), max_new_tokens=5 + i)
    engine.step()
    engine.submit("rare", PROMPT, namespace=of(rare))
    count = 4
    while "rare" not in engine.outs:
        while len(engine.prefill.waiting) < 4:
            engine.submit(f"p{count}", prompt(count), namespace=of(popular), max_new_tokens=5)
            count += 1
            engine._handle(engine.inbox.pop())
        engine.step()
        assert count < 3 * MOST_PASSING
    engine.run()


def test_a_client_with_many_adapters_delays_the_only_one_of_another_by_one_answer(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", max_running_requests=4)
    many, only = [engine.added(f"{i}", i) for i in range(8)], engine.added("only", 9)
    for i in range(80):
        engine.submit(f"{i}", prompt(i, 9), namespace=of(many[i % 8]), client="many", max_new_tokens=4)
    while len(engine.outs) < 20:
        engine.step()
    engine.submit("only", PROMPT, namespace=of(only), client="one")
    engine.step()
    begun = len(engine.outs)
    while "only" not in engine.outs:
        engine.step()
    assert len(engine.outs) <= begun + 4
    engine.run()


def test_a_kept_slot_is_found_behind_any_number_of_more_urgent_requests(model: Path, tmp_path: Path) -> None:
    settings = {"max_loras": 1, "max_running_requests": 64, "schedule_policy": "priority"}
    engine = AdapterHarness(model, tmp_path / "root", **settings)
    popular, rare = engine.added("popular", 1), engine.added("rare", 2)
    engine.submit("runs", prompt(0), namespace=of(popular), max_new_tokens=100)
    engine.step()
    engine.submit("rare", prompt(1), namespace=of(rare))
    for i in range(MOST_PASSING):
        engine.submit(f"p{i}", prompt(i), namespace=of(popular), max_new_tokens=2)
    while engine.cache.slots.admits(popular, None):
        engine.step()
        assert "rare" not in engine.outs, "no slot was kept for it"
    for i in range(2 * MOST_PASSED):
        engine.submit(f"urgent {i}", [1, 2, 3], namespace=of(popular), priority=1, max_new_tokens=1)
    engine.run()


def test_a_retracted_request_gets_its_adapter_back(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", max_loras=1)
    digests = [engine.added("a", 1), engine.added("b", 2)]
    expected = [engine.generate(f"alone {i}", prompt(i), namespace=of(digests[i % 2])) for i in range(6)]
    rng = random.Random(0)
    for i in range(6):
        engine.submit(f"{i}", prompt(i), namespace=of(digests[i % 2]))
    for _ in range(40):
        engine.step()
        engine.retract_one(rng)
    engine.run()
    assert [engine.tokens(f"{i}") for i in range(6)] == expected


def test_adapters_outlive_a_sleep(model: Path, tmp_path: Path) -> None:
    from treeline_runtime.messages import SleepReq, WakeReq

    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1)
    expected = engine.generate("before", PROMPT, namespace=of(digest))
    for message in (SleepReq("sleep", 2), WakeReq("wake")):
        assert engine.ask(message).ok  # type: ignore[arg-type]
    assert engine.generate("after", PROMPT, namespace=of(digest)) == expected


def test_the_load_names_adapters_with_running_and_with_waiting_requests(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", max_loras=1)
    one, other = engine.added("a", 1), engine.added("b", 2)
    assert engine.add("also a", "a").ok
    for rid, digest in (("runs", one), ("waits", other)):
        engine.submit(rid, PROMPT, namespace=of(digest))
    engine.step()
    load = engine.load()
    assert (load.max_loras, load.running_adapters, load.waiting_adapters) == (1, ["a", "also a"], ["b"])
    engine.run()
    assert (engine.load().running_adapters, engine.load().waiting_adapters) == ([], [])
    assert Harness(model).load().max_loras == 0


# ---- coming and going -------------------------------------------------------------------------------------------


def test_unloading_waits_for_those_who_run_and_wait(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root", max_loras=1)
    one, other = engine.added("a", 1), engine.added("b", 2)
    engine.submit("runs", PROMPT, namespace=of(one))
    engine.submit("waits", PROMPT, namespace=of(other))
    engine.step()
    for name in ("a", "b"):
        reply = engine.remove(name)
        assert not reply.ok
        assert reply.data == {"busy": True}
    engine.run()
    assert engine.remove("a").ok
    assert engine.remove("b").ok
    assert engine.residence.adapters == {}


def test_a_request_for_an_adapter_that_has_gone_is_a_404(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1)
    assert engine.remove("a").ok
    engine.submit("late", PROMPT, namespace=of(digest))
    engine.run()
    finish = engine.outs["late"][-1].finish
    assert finish is not None
    assert (finish.status, finish.message) == (404, "the request's adapter has been unloaded")


def test_an_adapter_with_two_names_goes_with_the_last(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1)
    assert engine.add("b", "a").ok
    assert list(engine.residence.adapters) == [digest]
    engine.submit("runs", PROMPT, namespace=of(digest))
    engine.step()
    assert engine.remove("a").ok, "requests do not say by which name they came"
    engine.run()
    assert engine.remove("b").ok
    assert engine.residence.adapters == {}


def test_loading_again_is_allowed_if_nothing_would_change(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    engine.added("a", 1)
    assert engine.add("a").ok
    engine.write("a", 2)
    reply = engine.add("a")
    assert not reply.ok
    assert "unload it first" in str(reply.message)


def test_a_refused_adapter_changes_nothing(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    digest = engine.added("a", 1)
    expected = engine.generate("before", PROMPT, namespace=of(digest))
    engine.write("bad", 2)
    (engine.root / "bad" / WEIGHTS).write_bytes(b"\0" * 100)
    for path, problem in (("bad", "no whole file"), ("none", "is not a file"), ("../model", "--lora-root")):
        reply = engine.add("bad", path)
        assert not reply.ok
        assert problem in str(reply.message)
    assert engine.adapters.names == {"a": digest}
    engine.cache.wipe()
    assert engine.generate("after", PROMPT, namespace=of(digest)) == expected


def test_without_a_root_nothing_is_loaded_and_the_answer_says_what_to_do(model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "root/a", {"layers.0.self_attn.q_proj": (32, 32)})
    engine = AdapterHarness(model, tmp_path / "root", lora_root=None)
    reply = engine.add("a")
    assert not reply.ok
    assert "--lora-root DIR" in str(reply.message)


def test_an_empty_root_is_none(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AdapterHarness(model, tmp_path / "root", lora_root="")
    engine.write("a", 1)
    monkeypatch.chdir(engine.root)
    assert "--lora-root" in (engine.add("a").message or "")


def test_what_a_file_says_is_not_repeated_at_any_length(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    engine.write("a", 1, edit={"x" * 1_000_000: torch.ones(1)})
    assert 20 < len(engine.add("a").message or "") < 2000


def test_only_so_many_are_loaded_at_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MOST_NAMES", 2)
    engine = AdapterHarness(model, tmp_path / "root")
    engine.added("a", 1)
    assert engine.add("same", "a").ok
    assert "unload one first" in (engine.add("more", "a").message or "")
    assert engine.add("same", "a").ok, "it is there"
    assert engine.remove("a").ok
    assert engine.add("more", "a").ok


def test_unloading_again_is_no_failure_as_the_first_answer_may_be_lost(model: Path, tmp_path: Path) -> None:
    engine = AdapterHarness(model, tmp_path / "root")
    engine.added("a", 1)
    assert engine.remove("a").ok
    assert engine.remove("a").ok, "whether there is one is known to the server"


def test_adapters_are_loaded_at_the_start(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "anywhere", {"layers.0.self_attn.q_proj": (32, 32)})
    engine = AdapterHarness(model, tmp_path / "root", lora_root=None, lora_modules=(f"a={folder}",))
    engine.adapters.load_now(engine.config.lora_modules)
    engine.generate("r", PROMPT, namespace=of(engine.adapters.names["a"]))
    with pytest.raises(ModelError, match="--lora-modules b=/nowhere"):
        engine.adapters.load_now(("b=/nowhere",))


@pytest.mark.parametrize("rounds", [110, pytest.param(1000, marks=pytest.mark.deep)])
def test_loads_and_unloads_under_traffic_leave_nothing_and_no_stale_answer(
    model: Path, tmp_path: Path, rounds: int
) -> None:
    """One name gets other weights each round; requests for it, for a steady one and for the model run meanwhile."""
    engine = AdapterHarness(model, tmp_path / "root", max_total_tokens=512)
    steady = engine.added("steady", 0)
    expected: dict[tuple[str | None, int], list[int]] = {}
    for which in range(5):
        digest = engine.added("changing", 1 + which)
        for one in (digest, steady, None):
            expected[one, which] = engine.generate(f"first {which} {one}", PROMPT, namespace=of(one), max_new_tokens=3)
        assert engine.remove("changing").ok
    engine.cache.wipe()
    asked: list[tuple[str, tuple[str | None, int]]] = []
    matrices: list[weakref.ref[torch.Tensor]] = []
    for number in range(rounds):
        which = number % 5
        digest = engine.added("changing", 1 + which)
        matrices += map(weakref.ref, next(iter(engine.residence.adapters[digest].parts.values())))
        for one in (digest, steady, None):
            rid = f"{number} {one}"
            engine.inbox.append(
                GenerateReq(rid, PROMPT, SamplingParams(temperature=0.0, max_new_tokens=3), namespace=of(one))
            )
            asked.append((rid, (one, which)))
        while not engine.remove("changing").ok:
            engine.step()
    engine.run()
    assert all(engine.tokens(rid) == expected[one] for rid, one in asked)
    assert list(engine.residence.adapters) == [steady]
    assert engine.adapters.names == {"steady": steady}
    assert set(engine.cache.slots._slots) <= {steady}
    gc.collect()
    assert not any(matrix() is not None for matrix in matrices), "what was unloaded is still in memory"
