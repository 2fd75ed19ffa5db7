"""Pages that have left the device come back from the host, and answers are those of computing."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from support.tiered_engine import PROMPTS, Held, answers, engine, loading, report, round_of, steps
from treeline_runtime.config import ConfigError, SchedulerConfig, size_in_bytes
from treeline_runtime.kvcache import KVPool
from treeline_runtime.messages import (
    FlushReq,
    SleepReq,
    UpdateWeightsReq,
    WakeReq,
)
from treeline_runtime.scheduler import resolve, tiers
from treeline_runtime.scheduler.prefill import MOST_PASSED


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return answers(tiny)


def test_a_prefix_that_left_the_device_comes_back_from_the_host(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        assert round_of(made, "first", expected) == [0] * 6
        assert round_of(made, "second", expected) == [0] * 6  # a page is stored at its second use
        assert round_of(made, "third", expected) == [96] * 6
        found = report(made)
        assert found.total_loaded_tokens == {"CPU": 6 * 96, "DISK": 0, "PEER": 0}
        assert found.total_loads == {"loaded": 6, "computed": 0, "failed": 0}
        assert found.total_stored_tokens["CPU"] > 6 * 96
        assert found.used_bytes == {"CPU": found.total_stored_tokens["CPU"] * 256}


@pytest.mark.parametrize("settings", [{"overlap_depth": 1}, {"page_size": 16}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_other_settings_get_the_same_bytes(tiny: Path, settings: dict[str, Any]) -> None:
    with engine(tiny, host_cache=None, max_total_tokens=4096, **settings) as alone:
        answers = [alone.generate(str(i), ids) for i, ids in enumerate(PROMPTS)]
    with engine(tiny, **settings) as made:
        for name in "abc":
            cached = round_of(made, name, answers)
        assert cached == [96] * 6


def test_a_hit_stores_what_it_hits(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for rid in "ab":  # computed, then matched: the second use
            assert made.generate(rid, PROMPTS[0]) == expected[0]
        for i in range(1, 6):
            made.generate(f"other-{i}", PROMPTS[i])
        assert made.cache.tree.match(b"".join(t.to_bytes(4, "little") for t in PROMPTS[0])).num_pages == 0
        assert made.generate("c", PROMPTS[0]) == expected[0]
        assert made.last("c").cached_tokens == 96


def test_requests_with_one_prefix_share_a_load(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        for i in range(4):
            made.submit(str(i), PROMPTS[0])
        made.run()
        assert [made.tokens(str(i)) for i in range(4)] == [expected[0]] * 4
        assert [made.last(str(i)).cached_tokens for i in range(4)] == [96] * 4
        assert made.cache.tiers is not None
        assert made.cache.tiers.store.loaded_pages["CPU"] == 24


def test_salts_and_other_prompts_find_nothing(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        assert made.generate("salted", PROMPTS[0], namespace="salt") == expected[0]
        assert made.last("salted").cached_tokens == 0
        made.generate("other", [1, *PROMPTS[0]])
        assert made.last("other").cached_tokens == 0


def test_logprobs_of_the_prompt_are_computed(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        made.submit("all", PROMPTS[0], return_logprob=True, logprob_start_len=40)
        made.run()
        assert made.tokens("all") == expected[0]
        assert made.last("all").cached_tokens == 36


def test_flush_wipes_the_host(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        made.inbox.append(FlushReq("f"))
        made.run()
        assert made.replies[-1].ok
        assert round_of(made, "c", expected) == [0] * 6


def test_pages_of_the_host_survive_sleep(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        made.inbox += [SleepReq("s", 1), WakeReq("w")]
        made.run()
        assert all(reply.ok for reply in made.replies)
        assert round_of(made, "c", expected) == [96] * 6


def test_new_weights_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    from support.runtime_server import make_checkpoint

    first, second = (make_checkpoint(tmp_path / str(seed), seed=seed) for seed in range(2))
    settings = {"load_format": "auto", "disk_cache": str(tmp_path / "pages")}
    with engine(first, **settings) as made:
        for name in "abc":
            for i, ids in enumerate(PROMPTS):
                old = made.generate(f"{name}{i}", ids)
        assert made.last("c5").cached_tokens == 96
        made.inbox.append(UpdateWeightsReq("u", str(second)))
        made.run()
        assert made.replies[-1].ok, made.replies
        assert made.generate("new", PROMPTS[5]) != old
        assert made.last("new").cached_tokens == 0
        made.inbox.append(UpdateWeightsReq("u", str(first)))
        made.run()
        assert made.generate("back", PROMPTS[5]) == old
        assert made.last("back").cached_tokens == 96, "the disk has the pages of the first weights"


def test_a_bad_page_is_computed(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        assert made.cache.tiers is not None
        store = made.cache.tiers.store
        for slot in range(0, store.host.num_slots, 40):
            store._slab.page(slot)[7] ^= 1
        cached = round_of(made, "c", expected)
        assert 0 < sum(cached) < 6 * 96
        assert store.failures["bad_page"] > 0


def test_random_traffic_gets_the_answers_of_computing(tiny: Path, tmp_path: Path) -> None:
    """Aborts, retractions and flushes while pages come and go; the accounts are checked after every step."""
    rng = random.Random(3)
    families = [prompt(seed, 70) for seed in range(5)]
    asked = [rng.choice(families)[: rng.randint(30, 70)] + prompt(100 + i, rng.randint(1, 9)) for i in range(25)]
    alone = Harness(tiny)
    answers = {}
    for i, ids in enumerate(asked):
        alone.cache.flush()
        answers[str(i)] = alone.generate(str(i), ids, max_new_tokens=12)
    small = {"host_cache": 100 * 4 * 256, "disk_cache": str(tmp_path), "disk_cache_size": 200 * 1200}
    with engine(tiny, max_total_tokens=160, max_running_requests=4, overlap_depth=1, **small) as made:
        made.ratio.initial = made.ratio.minimum = made.ratio.value = 0.1  # optimistic: retractions happen
        sent: dict[str, str] = {}
        for step in range(500):
            action = rng.random()
            if action < 0.3:
                rid = str(len(sent))
                sent[rid] = str(rng.randrange(len(asked)))
                made.submit(rid, asked[int(sent[rid])], max_new_tokens=12)
            elif action < 0.34 and sent:
                made.abort(rng.choice(list(sent)))
            elif action < 0.35:
                made.inbox.append(FlushReq(str(step)))
            made.step()
            if step % 25 == 0:
                made.run()
        made.run()
        for rid, which in sent.items():
            tokens = made.tokens(rid)
            assert tokens == answers[which][: len(tokens)], rid
        assert made.cache.tiers is not None
        pages = made.cache.tiers.store
        assert pages.loaded_pages["CPU"] > 50
        assert pages.loaded_pages["DISK"] > 10
        assert not pages.failures["bad_page"]
        made.cache.tiers.store.host.check_integrity()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"disk_cache": "/tmp/x"}, "needs --host-cache"),
        ({"host_cache": 1 << 20, "tp_size": 2, "nnodes": 2, "dist_init_addr": "a:1"}, "one machine"),
        ({"host_cache": 1 << 20, "prefix_cache": "off"}, "--prefix-cache off"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig(model="none", **settings)


@pytest.mark.parametrize("size", [10, 1 << 50])
def test_a_host_cache_that_does_not_fit_is_refused(tiny: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="host_cache"):
        Harness(tiny, host_cache=size)


def test_a_host_cache_and_the_pool_of_a_cpu_share_its_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_available_memory", lambda: 1 << 20)
    with engine(tiny, host_cache=1 << 19, max_total_tokens=1024):
        pass
    with pytest.raises(ConfigError, match=r"host_cache needs 0\.00 GiB, but 0\.00 GiB of host memory are free"):
        Harness(tiny, host_cache=1 << 20, max_total_tokens=1024)


@pytest.mark.parametrize("text", ["", "abc", "1 PiB", "-1", ".", "1.2.3GiB", "9" * 400, "nan", "1e9", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size like 16GiB"):
        size_in_bytes(text)


def test_sizes() -> None:
    assert [size_in_bytes(text) for text in ("7", "2 kib", "1.5GiB", "1TiB", "2Gi")] == [
        7,
        2048,
        3 << 29,
        1 << 40,
        2 << 30,
    ]


def test_others_are_computed_while_one_waits_for_its_pages(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        held = Held(monkeypatch, KVPool, "copy_in")
        loading(made, "waits", PROMPTS[0])
        made.submit("other", [5, *prompt(99, 20)])
        made.submit("alike", PROMPTS[0])
        steps(made)
        assert made.last("other").finish is not None
        assert {"waits", "alike"} == set(made.prefill.waiting)
        held.go.set()
        made.run()
        for rid in ("waits", "alike"):
            assert made.tokens(rid) == expected[0]
            assert made.last(rid).cached_tokens == 96


def test_pages_whose_request_is_aborted_are_cached_when_they_come(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny) as made:
        for name in "ab":
            round_of(made, name, expected)
        held = Held(monkeypatch, KVPool, "copy_in")
        monkeypatch.setattr(tiers, "SETTLE_S", 0.01)
        loading(made, "aborted", PROMPTS[0])
        made.abort("aborted")
        made.inbox += [FlushReq("flush"), SleepReq("sleep", 2), UpdateWeightsReq("update", str(tiny))]
        made.step()
        assert made.finish("aborted").type == "abort"
        assert [reply.data for reply in made.replies] == [{"busy": True}] * 3
        held.go.set()
        made.run()
        assert made.generate("next", PROMPTS[0]) == expected[0]
        assert made.last("next").cached_tokens == 96
        assert made.cache.tiers is not None
        assert sum(made.cache.tiers.store.loaded_pages.values()) == 24


def test_decoding_requests_wait_for_copies_of_memory_rather_than_fail(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny, max_total_tokens=160) as made:
        for name in "ab":
            round_of(made, name, expected)
        held = Held(monkeypatch, KVPool, "copy_in")
        made.submit("long", prompt(50, 20), max_new_tokens=130)
        made.ratio.initial = made.ratio.minimum = made.ratio.value = 0.01
        made.step()
        made.submit("waits", PROMPTS[0])
        steps(made)
        assert made.last("long").finish is None, "it waits for pages that a load holds"
        held.go.set()
        made.run()
        assert made.finish("long").type == "length"
        assert made.tokens("waits") == expected[0]


def test_loads_of_a_client_leave_a_row_to_others(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its running requests do, also when they have been aborted."""
    with engine(tiny, max_total_tokens=1024, max_running_requests=8) as made:
        for name in "ab":
            for i, ids in enumerate(PROMPTS * 2):
                made.generate(f"{name}{i}", [i, *ids])
            made.cache.flush()
        held = Held(monkeypatch, KVPool, "copy_in")
        for i, ids in enumerate(PROMPTS * 2):
            made.submit(str(i), [i, *ids], client="greedy")
            made.step()
            made.abort(str(i))
        steps(made)
        assert len(made.cache.loading) <= 7
        made.submit("other", prompt(77, 8), client="modest")
        steps(made)
        assert made.last("other").finish is not None
        held.go.set()
        made.run()


def test_a_step_looks_at_a_bounded_number_of_requests_that_wait(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny, max_running_requests=8) as made:
        for name in "ab":
            round_of(made, name, expected)
        held = Held(monkeypatch, KVPool, "copy_in")
        for i in range(200):
            made.submit(str(i), PROMPTS[0], max_new_tokens=1)
        match, matched = made.cache.match, list[str]()
        made.step()
        monkeypatch.setattr(made.cache, "match", lambda req: matched.append(req.rid) or match(req))
        made.prefill.next_batch([], 8, 0.5)
        assert len(matched) <= MOST_PASSED
        held.go.set()
        made.run()
        assert {tuple(made.tokens(str(i))) for i in range(200)} == {tuple(expected[0][:1])}
