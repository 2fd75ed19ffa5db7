"""Pages that have left the device come back from host and disk, and answers are those of computing."""

from __future__ import annotations

import argparse
import errno
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.config import ConfigError, SchedulerConfig, size_in_bytes
from treeline_runtime.kvcache import KVPool, key_of, store
from treeline_runtime.kvcache.disk import DiskTier
from treeline_runtime.messages import (
    Copied,
    DrainReq,
    FlushReq,
    Removed,
    SleepReq,
    Stored,
    TierLoad,
    UpdateWeightsReq,
    WakeReq,
)
from treeline_runtime.scheduler import resolve, tiers
from treeline_runtime.scheduler.prefill import MOST_PASSED
from treeline_runtime.scheduler.tiers import STALLED_S
from treeline_wire.events import hash_of
from treeline_wire.namespaces import join_namespace

POOL_TOKENS = 256
"""The device holds two or three prompts."""
PROMPTS = [[*prompt(seed, 96), seed] for seed in range(6)]


@contextmanager
def engine(tiny: Path, **settings: Any) -> Iterator[Harness]:
    made = Harness(tiny, **{"max_total_tokens": POOL_TOKENS, "host_cache": 1 << 20} | settings)
    if made.cache.tiers is not None:
        made.cache.tiers.rates.allows = lambda _: True  # type: ignore[method-assign]  # whatever this machine measures
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    """What the prompts get, each computed alone."""
    alone = Harness(tiny)
    found = []
    for i, ids in enumerate(PROMPTS):
        alone.cache.flush()
        found.append(alone.generate(str(i), ids))
    return found


def round_of(engine: Harness, name: str, expected: list[list[int]]) -> list[int]:
    """Ask all prompts one after another; return the cached tokens of each."""
    cached = []
    for i, ids in enumerate(PROMPTS):
        rid = f"{name}-{i}"
        assert engine.generate(rid, ids) == expected[i], rid
        cached.append(engine.last(rid).cached_tokens)
    return cached


def report(engine: Harness) -> TierLoad:
    found = engine.loads[-1].tiers
    assert found is not None
    return found


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
        ({"host_cache": 1 << 20, "tp_size": 2}, "several ranks"),
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
    assert [size_in_bytes(text) for text in ("7", "2 kib", "1.5GiB", "1TiB")] == [7, 2048, 3 << 29, 1 << 40]


class Held:
    """Copies, reads or writes that wait until the test lets them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method, self.began, self.go = getattr(owner, name), threading.Event(), threading.Event()

        def wait(*of: Any) -> Any:
            self.began.set()
            assert self.go.wait(60)
            return method(*of)

        monkeypatch.setattr(owner, name, wait)


def steps(engine: Harness) -> None:
    """Step until only a copy can change anything."""
    while engine.step():
        pass


def loading(engine: Harness, rid: str, ids: list[int]) -> None:
    """Submit a request, and step until its pages are being loaded."""
    engine.submit(rid, ids)
    steps(engine)
    assert [req.rid for req in engine.cache.loading] == [rid]
    assert rid in engine.prefill.waiting


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


DISK: dict[str, Any] = {"host_cache": 60 * 4 * 256, "disk_cache_size": 1 << 20}
"""The host holds two of the prompts."""


def test_a_prefix_that_left_the_host_comes_back_from_the_disk_also_after_a_restart(
    tiny: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with engine(tiny, disk_cache=str(tmp_path), **DISK) as made:
        for name in "abc":
            cached = round_of(made, name, expected)
        assert cached == [96] * 6
        assert made.cache.tiers is not None
        assert made.cache.tiers.store.loaded_pages["DISK"] > 100
    with engine(tiny, disk_cache=str(tmp_path), **DISK) as again:
        assert round_of(again, "d", expected) == [96] * 6
    with engine(tiny, disk_cache=str(tmp_path), context_length=256, **DISK) as other:
        assert round_of(other, "e", expected) == [0] * 6, "rope may depend on it"


def test_a_full_disk_is_counted_and_no_request_fails(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskTier, "write", full)
    with engine(tiny, disk_cache=str(tmp_path), **DISK) as made:
        for name in "abc":
            round_of(made, name, expected)
        assert report(made).total_failures["disk"] > 0


def test_a_disk_that_fails_to_read_is_counted_and_no_request_fails(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskTier, "read", broken)
    with engine(tiny, disk_cache=str(tmp_path), **DISK) as made:
        for name in "abcd":
            round_of(made, name, expected)
        assert report(made).total_failures["disk"] > 0


def test_a_long_load_is_shared_by_threads_and_keeps_what_is_before_a_bad_page(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PART_BYTES", 2048)
    monkeypatch.setattr(store, "THREADS", 4)
    with engine(tiny) as made:
        for name in "abc":
            cached = round_of(made, name, expected)
        assert cached == [96] * 6
        assert made.cache.tiers is not None
        pages = made.cache.tiers.store
        digest = made.cache.tree.digests_of(made.cache.tree.match(key_of(PROMPTS[5])).node)[13]
        pages._slab.page(pages.host._entries[digest].slot)[0] ^= 1
        made.cache.flush()
        assert made.generate("d", PROMPTS[5]) == expected[5]
        assert made.last("d").cached_tokens in range(13 * 4 + 1)
        assert report(made).total_failures["bad_page"] == 1


def test_flush_waits_for_copies_that_have_not_ended(tiny: Path) -> None:
    with engine(tiny) as made:
        for rid in "ab":
            made.submit(rid, PROMPTS[0], max_new_tokens=1)
            while not made.outs.get(rid):
                made.step()
        made.inbox.append(FlushReq("f"))
        made.step()
        assert made.replies[-1].ok
        made.assert_clean()


def test_flush_wipes_the_disk(tiny: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(tiny, disk_cache=str(tmp_path), **DISK) as made:
        for name in "ab":
            round_of(made, name, expected)
        made.inbox.append(FlushReq("f"))
        made.run()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def test_what_a_slow_tier_has_is_computed(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny) as made:
        assert made.cache.tiers is not None
        made.cache.tiers.rates.allows = lambda _: False  # type: ignore[method-assign]
        for name in "abc":
            cached = round_of(made, name, expected)
        assert cached == [0] * 6
        assert report(made).total_loads == {"loaded": 0, "computed": 6, "failed": 0}


def test_a_host_that_is_smaller_than_a_prompt_has_its_beginning(tiny: Path, expected: list[list[int]]) -> None:
    with engine(tiny, host_cache=20 * 4 * 256) as made:
        for name in "ab":
            round_of(made, name, expected)
        assert made.generate("c", PROMPTS[5]) == expected[5]
        assert made.last("c").cached_tokens >= 80


def test_events_say_which_tiers_have_a_page(tiny: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """A reader of events and the tiers agree, whatever came and went."""
    with engine(tiny, disk_cache=str(tmp_path), **DISK | {"disk_cache_size": 100 * 1200}) as made:
        told: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "DISK": set()}
        for name in "abcd":
            round_of(made, name, expected)
            for event in [event for update in made.updates for event in update.events]:
                match event:
                    case Stored():
                        told["GPU"] |= set(event.block_hashes)
                    case Copied():
                        assert set(event.block_hashes) <= set.union(*told.values())
                        told[event.medium] |= set(event.block_hashes)
                    case Removed():
                        told[event.medium] -= set(event.block_hashes)
            made.updates.clear()
            assert made.cache.tiers is not None
            pages, disk = made.cache.tiers.store, made.cache.tiers.store.disk
            assert disk is not None
            assert told["GPU"] == {block for block, *_ in made.cache.tree.blocks()}
            assert told["CPU"] == {hash_of(digest) for digest in pages.host._entries}
            assert told["DISK"] == {hash_of(digest) for _, digest in disk._files}
        assert len(told["DISK"]) > 60


def from_disk(made: Harness, expected: list[list[int]]) -> None:
    """Bring all prompts to the disk, and to nowhere else."""
    for name in "ab":
        round_of(made, name, expected)
    assert made.cache.tiers is not None
    made.cache.flush()
    made.cache.tiers.store.forget("CPU")


LARGE: dict[str, Any] = {"disk_cache_size": 1 << 20, "max_total_tokens": 1024}
"""Everything fits everywhere."""


def test_a_disk_that_hangs_is_waited_for_once_and_holds_no_page_of_the_device(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    with engine(tiny, clock=lambda: now[0], disk_cache=str(tmp_path), **LARGE) as made:
        from_disk(made, expected)
        monkeypatch.setattr(tiers, "SETTLE_S", 0.01)
        held = Held(monkeypatch, DiskTier, "read")
        made.submit("waits", PROMPTS[0])
        made.submit("alike", PROMPTS[0])
        steps(made)
        assert held.began.wait(60)
        assert set(made.prefill.waiting) == {"waits", "alike"}
        assert made.cache.used_pages == 0
        now[0] = STALLED_S
        steps(made)
        made.submit("later", PROMPTS[1])
        steps(made)
        for rid, i in (("waits", 0), ("alike", 0), ("later", 1)):
            assert made.tokens(rid) == expected[i]
        assert made.last("later").cached_tokens == 0, "nothing more is asked of the disk"
        assert report(made).total_loads["failed"] == 1
        made.inbox.append(FlushReq("f"))
        made.step()
        assert made.replies[-1].message == "pages are being copied, and the disk does not answer"
        held.go.set()
        made.run()
        assert made.generate("answers again", PROMPTS[2]) == expected[2]
        assert made.last("answers again").cached_tokens == 96


def test_running_requests_never_wait_for_the_disk(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of memory, while all reads and writes hang."""
    settings = LARGE | {"max_total_tokens": 160}
    with engine(tiny, disk_cache=str(tmp_path), **settings) as made:
        from_disk(made, expected)
        reads, writes = (Held(monkeypatch, DiskTier, name) for name in ("read", "write"))
        made.ratio.initial = made.ratio.minimum = made.ratio.value = 0.01
        made.submit("waits", PROMPTS[0])
        steps(made)
        assert reads.began.wait(60)
        for i in range(3):
            made.submit(f"long {i}", prompt(50 + i % 2, 20), max_new_tokens=90)
        for _ in range(2000):
            made.step()
            if all(made.outs.get(f"long {i}") and made.last(f"long {i}").finish for i in range(3)):
                break
        assert all(made.finish(f"long {i}").type == "length" for i in range(3))
        assert sum(made.last(f"long {i}").retractions for i in range(3)) > 0
        reads.go.set()
        writes.go.set()
        made.run()
        assert made.tokens("waits") == expected[0]


def test_a_client_has_a_bounded_piece_on_its_way_from_the_disk(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "FETCH_BYTES", 10 * 1024)
    with engine(tiny, disk_cache=str(tmp_path), **LARGE) as made:
        from_disk(made, expected)
        held = Held(monkeypatch, DiskTier, "read")
        for i, ids in enumerate(PROMPTS[:5]):
            made.submit(f"greedy {i}", ids, client="greedy")
        made.submit("modest", PROMPTS[5], client="modest")
        steps(made)
        assert made.cache.tiers is not None
        found = [(fetch.client, len(fetch.digests)) for fetch in made.cache.tiers._fetches]
        assert found == [("greedy", 10), ("modest", 10)]
        held.go.set()
        made.run()
        for i in range(6):
            rid = f"greedy {i}" if i < 5 else "modest"
            assert made.tokens(rid) == expected[i]
            assert made.last(rid).cached_tokens == 96, "piece by piece"


def test_prompts_that_take_turns_in_a_host_too_small_for_them_end(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "FETCH_BYTES", 9 * 1024)
    with engine(tiny, disk_cache=str(tmp_path), **DISK) as made:
        for name in "ab":
            round_of(made, name, expected)
        for turn in range(3):
            for i, ids in enumerate(PROMPTS):
                made.submit(f"{turn} {i}", ids, client=str(i))
        made.run()
        for turn in range(3):
            for i in range(6):
                assert made.tokens(f"{turn} {i}") == expected[i]


@pytest.mark.parametrize("host", [1, 2, 9])
@pytest.mark.parametrize("tokens", [100, 104, 160])
def test_tiny_sizes(tiny: Path, tmp_path: Path, expected: list[list[int]], host: int, tokens: int) -> None:
    """A device that just holds a prompt, a host of a page, a disk of two files."""
    small = {"host_cache": host * 1024, "disk_cache": str(tmp_path), "disk_cache_size": 2 * 1200}
    with engine(tiny, max_total_tokens=tokens, page_size=4, **small) as made:
        for name in "abc":
            for i, ids in enumerate(PROMPTS):
                tokens_out = made.generate(f"{name}{i}", ids[: tokens - 10], max_new_tokens=4)
                assert len(tokens_out) == 4


def test_prompts_of_two_clients_with_equal_text_are_apart_on_the_disk_too(
    tiny: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    one, other = (join_namespace(None, None, client) for client in "ab")
    with engine(tiny, disk_cache=str(tmp_path), **LARGE) as made:
        for rid in "ab":
            made.generate(rid, PROMPTS[0], namespace=one)
    with engine(tiny, disk_cache=str(tmp_path), **LARGE) as again:
        assert again.generate("other", PROMPTS[0], namespace=other) == expected[0]
        assert again.last("other").cached_tokens == 0
        assert again.generate("one", PROMPTS[0], namespace=one) == expected[0]
        assert again.last("one").cached_tokens == 96


def test_a_server_that_drains_does_not_wait_for_copies(
    tiny: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny, disk_cache=str(tmp_path), **LARGE) as made:
        held = Held(monkeypatch, DiskTier, "write")
        for rid in "ab":
            made.submit(rid, PROMPTS[0])
            steps(made)
        assert held.began.wait(60)
        made.inbox.append(DrainReq())
        steps(made)
        assert made.is_idle
        assert (made.loads[-1].running, made.loads[-1].waiting) == (0, 0)
        held.go.set()
        made.run()
