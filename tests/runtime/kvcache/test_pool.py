from __future__ import annotations

import numpy as np
import pytest
import torch
from treeline_runtime.kvcache import KVPool, PagePool


def test_every_page_is_handed_out_once_and_comes_back() -> None:
    pool = PagePool(10)
    first, second = pool.alloc(4), pool.alloc(6)
    assert sorted([*first, *second]) == list(range(10))
    assert pool.num_free == 0
    pool.free(first)
    pool.check_integrity()
    assert sorted(pool.alloc(4)) == sorted(first)
    assert PagePool(5).alloc(3).tolist() == [0, 1, 2]
    assert len(pool.alloc(0)) == 0


def test_misuse_is_an_assertion() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        pool.alloc(3)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages[:1])
    pool._stack[0] = pool._stack[1]
    with pytest.raises(AssertionError, match="in the free list twice"):
        pool.check_integrity()


def test_random_traffic_keeps_the_books_straight() -> None:
    rng = np.random.default_rng(0)
    pool, held = PagePool(50), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.integers(len(held))))
        else:
            held.append(pool.alloc(int(rng.integers(0, pool.num_free + 1))))
        pool.check_integrity()
        assert pool.num_free + sum(map(len, held)) == 50


def test_tokens_land_in_their_slots() -> None:
    pool = KVPool(
        num_layers=2,
        num_pages=3,
        page_size=2,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    k = torch.arange(4.0).reshape(2, 1, 2)
    pool.store(1, torch.tensor([5, 0]), k, -k)
    assert pool.keys[1][2, 1, 0].tolist() == [0.0, 1.0]
    assert pool.keys[1][0, 0, 0].tolist() == [2.0, 3.0]
    assert pool.values[1][0, 0, 0].tolist() == [-2.0, -3.0]
    assert not pool.keys[0].any()
