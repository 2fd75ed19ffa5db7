"""The random numbers of sampling: independent, exact in the tail that decides, the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from treeline_runtime.sampling.noise import negative_exponentials, row_keys

KEYS = [[-501176263, 2065550767], [656671904, -1550686893]]
NUMBERS = [3.655855, 0.77324, 0.206779, 0.158759, 1.653829]


def times(rows: list[tuple[int, int]], vocab: int) -> torch.Tensor:
    return -negative_exponentials(keys(rows), vocab)


def keys(rows: list[tuple[int, int]], device: str = "cpu") -> torch.Tensor:
    seeds, indices = zip(*rows, strict=True)
    return torch.from_numpy(row_keys(seeds, indices)).to(device)


def z_of(counts: torch.Tensor, expected: float) -> float:
    """Return the chi-square of a flat histogram, in standard deviations from its mean."""
    freedom = len(counts) - 1
    return (float(((counts.double() - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def test_the_variates_are_exponential_and_independent_of_their_neighbours() -> None:
    found = times([(seed, index) for seed in range(40) for index in range(25)], 2048).double()
    assert found.min() > 0
    assert found.isfinite().all()
    uniform = torch.exp(-found)
    assert abs(z_of(torch.histc(uniform, 1000, 0, 1), uniform.numel() / 1000)) < 4
    grid = uniform.view(40, 25, 2048)
    pairs = {
        "tokens": (grid[..., :-1], grid[..., 1:]),
        "tokens 64 apart": (grid[..., :-64], grid[..., 64:]),
        "indices": (grid[:, :-1], grid[:, 1:]),
        "seeds": (grid[:-1], grid[1:]),
    }
    for name, (x, y) in pairs.items():
        cells = (x * 32).long().clamp(max=31) * 32 + (y * 32).long().clamp(max=31)
        counts = torch.bincount(cells.flatten(), minlength=1024)
        assert abs(z_of(counts, cells.numel() / 1024)) < 4, name


@pytest.mark.parametrize("what", ["seed", "index"])
def test_every_token_wins_equally_often(what: str) -> None:
    rows = [(i, 7) if what == "seed" else (5, i) for i in range(100_000)]
    winners = times(rows, 64).argmin(-1)
    assert abs(z_of(torch.bincount(winners, minlength=64), len(rows) / 64)) < 4
    successive = torch.bincount(winners[:-1] % 8 * 8 + winners[1:] % 8, minlength=64)
    assert abs(z_of(successive, len(rows) / 64)) < 4


def test_very_small_variates_are_as_frequent_as_they_should_be() -> None:
    """Small variates make unlikely tokens win."""
    found = torch.cat([times([(seed, 0)], 100_000)[0] for seed in range(100)])
    for limit in (1e-3, 1e-4, 1e-5):
        expected = limit * len(found)
        assert abs(int((found < limit).sum()) - expected) < 4 * math.sqrt(expected)


def test_a_variate_depends_on_seed_index_and_token_alone() -> None:
    rows = [(3, 4), (-5, 0), (1 << 62, 9), (3, 5)]
    together = times(rows, 50)
    for i, row in enumerate(rows):
        assert torch.equal(times([row], 50)[0], together[i])
    assert len(together.unique()) == together.numel()
    ids = torch.tensor([[7, 0, 49]] * len(rows))
    chosen = -negative_exponentials(keys(rows), 50, ids)
    assert torch.equal(chosen, together.gather(1, ids))


def test_random_numbers_equal_those_of_this_release() -> None:
    """A change here changes the output of every seed: put it into the changelog."""
    assert row_keys([0, 42], [0, 7]).tolist() == KEYS
    assert [round(x, 6) for x in times([(42, 7)], 5)[0].tolist()] == NUMBERS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_computes_the_same_numbers() -> None:
    rows = [(seed, index) for seed in range(16) for index in range(4)]
    found = negative_exponentials(keys(rows, "cuda"), 152_000).cpu()
    # the integers are the same; log1p may differ in the last bit
    torch.testing.assert_close(-found, times(rows, 152_000), rtol=1e-6, atol=0)
