"""The paged cache against a naive model."""

import random

import pytest
from treeline_sim.model.cache import PagedCache


class NaiveCache:
    """Blocks with the time when they were last given back, and who uses them."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock, self.private = capacity, 0, 0
        self.users: dict[int, int] = {}
        self.freed: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        gone = []
        while self.private + len(self.users) + count > self.capacity:
            oldest = min((block for block, used in self.users.items() if not used), key=self.freed.__getitem__)
            del self.users[oldest]
            gone.append(oldest)
        self.private += count
        return gone

    def name(self, blocks: list[int]) -> None:
        self.private -= len(blocks)
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1

    def give(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            self.clock += 1
            self.freed[block] = self.clock


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_evicts_the_least_recently_returned_and_no_used_blocks(seed: int) -> None:
    rng = random.Random(seed)
    cache, naive = PagedCache(16, 24), NaiveCache(24)
    running: list[list[int]] = []
    for _ in range(300):
        prompt = [rng.randrange(4), *(10 * (at + 1) + rng.randrange(3) for at in range(rng.randrange(1, 7)))]
        held = cache.matched(prompt)
        assert held == next((at for at, block in enumerate(prompt) if block not in naive.users), len(prompt))
        new = len(prompt) - held
        if rng.random() < 0.6 and new + cache.unused(prompt[:held]) <= cache.room:
            cache.use(prompt[:held])
            for block in prompt[:held]:
                naive.users[block] += 1
            assert cache.take(new) == naive.take(new)
            before = set(naive.users)
            naive.name(prompt[held:])
            assert cache.name(prompt[held:]) == [block for block in prompt[held:] if block not in before]
            running.append(prompt)
        elif running:
            done = running.pop(rng.randrange(len(running)))
            cache.give(done)
            naive.give(done)
        cache.check()
        assert (cache.cached, cache.private) == (len(naive.users), naive.private)
        assert cache.evictable == sum(not used for used in naive.users.values())


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        PagedCache(16, 0)
