"""An engine whose device holds two or three prompts, above a host and a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from treeline_runtime.published import TierLoad

from support.runtime_engine import Harness, prompt

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


def answers(tiny: Path) -> list[list[int]]:
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


DISK: dict[str, Any] = {"host_cache": 60 * 4 * 256, "disk_cache_size": 1 << 20}
"""The host holds two of the prompts."""
