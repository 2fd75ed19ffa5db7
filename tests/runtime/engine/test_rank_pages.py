"""Pages of a model that is split over several ranks leave the device and come back as a whole, or not at all."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.eagle_heads import write_head
from support.runtime_engine import prompt
from support.runtime_server import eventually
from treeline_runtime import Engine, SamplingParams
from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache import host
from treeline_runtime.models import ModelError
from treeline_runtime.scheduler.ranks.group import Followers, Peer
from treeline_runtime.scheduler.ranks.protocol import Copied, Share
from treeline_runtime.scheduler.rates import LoadRates
from treeline_runtime.scheduler_thread import EngineDead

pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("ranks_are_forked", "nothing_is_left")]

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 256, "device": "cpu", "threads": 1}
PROMPTS = [prompt(seed, 96) for seed in range(6)]
"""The device holds two or three of them."""


@pytest.mark.parametrize(
    "sizes",
    [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 2, "has_head": True}],
    ids=str,
)
def test_pages_of_all_ranks_come_back_from_the_host_and_the_disk(
    sizes: dict[str, Any], checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, page_bytes = dict(sizes), 1024
    if sizes.pop("has_head", False):  # rank 0's alone
        head = write_head(tmp_path / "head", checkpoints[0], (0, 1, 1))
        sizes |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
        page_bytes += 4 * (2 * 2 * 16 + 32) * 4
    monkeypatch.setattr(LoadRates, "allows", lambda _self, _tier: True)  # whatever this machine measures
    with Engine(checkpoints[0], **SETTINGS, **sizes) as engine:
        expected = [engine.generate(ids, GREEDY).token_ids for ids in PROMPTS]
    # the host holds two prompts: the others are on the disk
    settings = SETTINGS | {"host_cache": 60 * page_bytes, "disk_cache": str(tmp_path / "disk")} | sizes
    for warm in (False, True):  # and again after a restart
        with Engine(checkpoints[0], **settings) as engine:

            def cached(engine: Engine = engine) -> list[int]:
                outputs = [engine.generate(ids, GREEDY) for ids in PROMPTS]
                assert [output.token_ids for output in outputs] == expected
                return [output.cached_tokens for output in outputs]

            assert (sum(cached()) > 3 * 92) == warm
            eventually(lambda: cached() == [92] * 6, what="all are kept")  # a disk that is slow gets fewer at once


@pytest.mark.parametrize("to_host", [True, False])
def test_a_page_is_not_used_if_one_rank_could_not_copy_its_part(
    to_host: bool, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRates, "allows", lambda _self, _tier: True)
    copy = Followers.copy

    def elsewhere(self: Followers, out: bool, pages: list[int], slots: list[int]) -> Future[None]:
        """Name slots that are not there."""
        return copy(self, out, pages, [slot + 10**6 * (out == to_host) for slot in slots])

    monkeypatch.setattr(Followers, "copy", elsewhere)
    with Engine(checkpoints[0], **SETTINGS) as engine:
        expected = [engine.generate(ids, GREEDY).token_ids for ids in PROMPTS]
    with Engine(checkpoints[0], tp_size=2, host_cache=1 << 20, **SETTINGS) as engine:
        for _ in range(4):
            outputs = [engine.generate(ids, GREEDY) for ids in PROMPTS]
            assert [output.token_ids for output in outputs] == expected
            assert not any(output.cached_tokens for output in outputs)


def shared() -> list[str]:
    """Return where this process has shared memory open."""
    places = (f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd"))
    return [place for place in places if os.path.lexists(place) and "treeline pages" in os.readlink(place)]


def test_the_shared_memory_ends_with_the_engine_and_with_a_start_that_fails(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = SETTINGS | {"host_cache": 1 << 20, "disk_cache": str(tmp_path)}
    with Engine(checkpoints[0], tp_size=2, **settings):
        there = shared()
        assert there
        with pytest.raises(ConfigError, match="another server"):
            Engine(checkpoints[0], tp_size=2, **settings)
        assert set(shared()) <= set(there)
    eventually(lambda: not shared(), what="it is closed")


def test_what_a_rank_says_of_its_copies_after_another_is_lost_is_late(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, peers = Followers._copied, list[Peer]()

    def late(self: Followers, word: Copied, name: str) -> None:
        if name == "rank 2":
            peers[:] = self._peers
            assert peers[0].child is not None
            peers[0].child.kill()
            self._failed.wait()
        copied(self, word, name)

    def ask() -> None:
        with Engine(checkpoints[0], tp_size=4, host_cache=1 << 20, **SETTINGS) as engine:
            while True:
                engine.generate(PROMPTS[0], GREEDY)

    monkeypatch.setattr(Followers, "_copied", late)
    with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
        ask()
    eventually(lambda: all(peer.stream.fileno() < 0 for peer in peers), what="all streams are closed")
    assert len(peers) == 3


def test_shared_memory_for_which_there_is_no_room_is_refused(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(host.mmap, "mmap", fail)
    with pytest.raises(ConfigError, match=r"no memory for --host-cache 1048576: .* free: make it smaller"):
        Engine(checkpoints[0], tp_size=2, host_cache=1 << 20, **SETTINGS)
    eventually(lambda: not shared(), what="it is closed")


def test_a_rank_that_cannot_open_the_shared_memory_ends_the_start(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Followers.tell

    def misplace(self: Followers, command: Any) -> None:
        tell(self, Share("/nowhere", command.page_bytes) if isinstance(command, Share) else command)

    monkeypatch.setattr(Followers, "tell", misplace)
    with pytest.raises(ModelError, match=r"^rank 1: FileNotFoundError"):
        Engine(checkpoints[0], tp_size=2, host_cache=1 << 20, **SETTINGS)
