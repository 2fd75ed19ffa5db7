"""Pages that have left the host come back from the disk; and what the tiers do when it fails, hangs or is small."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from support.tiered_engine import DISK, PROMPTS, Held, answers, engine, report, round_of, steps
from treeline_runtime.kvcache import key_of, store
from treeline_runtime.kvcache.disk import DiskTier
from treeline_runtime.messages import DrainReq, FlushReq
from treeline_runtime.published import Copied, Removed, Stored
from treeline_runtime.scheduler import tiers
from treeline_runtime.scheduler.tiers import STALLED_S
from treeline_wire.events import hash_of
from treeline_wire.namespaces import join_namespace


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return answers(tiny)


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
        assert made.load().pages_used == 0
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
        assert made.replies[-1].message == "pages are being copied, and the disk or a rank does not answer"
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
