from __future__ import annotations

import numpy as np
import pytest
import torch
from support import fp8
from treeline_runtime.kvcache import KVPool, PagePool


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


def fp8_pool() -> KVPool:
    return KVPool(
        num_layers=2,
        num_pages=3,
        page_size=2,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        stored=torch.float8_e4m3fn,
        scales=[(1.0, 1.0), (0.5, 0.01)],
    )


def test_a_pool_of_fp8_takes_a_byte_for_each_number_and_divides_it_by_its_layers_scale() -> None:
    pool = fp8_pool()
    assert pool.keys[0].element_size() == 1
    k = torch.tensor([[[0.3, -1.0, 500.0, 2.0]]], dtype=torch.bfloat16)
    for layer, (key_scale, value_scale) in enumerate(((1.0, 1.0), (0.5, 0.01))):
        pool.store(layer, torch.tensor([3]), k, -k)
        keys, values = pool.gather(layer, torch.tensor([1]))
        assert keys.dtype == torch.bfloat16
        torch.testing.assert_close(keys[0, 1], fp8.rounded(k[0], key_scale).bfloat16())
        torch.testing.assert_close(values[0, 1], fp8.rounded(-k[0], value_scale).bfloat16())
        assert not keys[0, 0].any()
    pool.clear(np.array([1]))
    assert not pool.gather(1, torch.arange(4))[0].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_infinities_stored_as_fp8_are_found(wrong: float) -> None:
    for layer in (0, 1):
        pool = fp8_pool()
        x = torch.full((2, 1, 4), 1e4)
        slots = torch.tensor([0, 5])
        pool.store(layer, slots, x, x)
        assert pool.are_finite(slots).tolist() == [True, True]
        x[1, 0, 2] = wrong
        pool.store(layer, slots, torch.ones(2, 1, 4), x)
        assert pool.are_finite(slots).tolist() == [True, False]
