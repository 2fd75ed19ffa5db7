"""Packed products against torch's own."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F
from treeline_runtime.models.quantization.product import Packed, Plain, float_product
from treeline_runtime.ops import onednn
from treeline_runtime.ops.torch_ops import TorchOps

TYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def of_another_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_is_intel", lambda: False)


def product(dtype: torch.dtype, outputs: int = 40, inputs: int = 24) -> tuple[Packed, torch.Tensor]:
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    if not onednn.can_pack(weight):
        pytest.skip("there is no such kernel here")
    packed = float_product(TorchOps(), weight)
    assert isinstance(packed, Packed)
    return packed, weight


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 97, 128, 129, 256, 1700])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_equals_the_plain_one(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    packed, weight = product(dtype)
    wide = torch.randn((rows, 3, 24), generator=torch.Generator().manual_seed(rows)).to(dtype)
    bias = torch.arange(40, dtype=torch.float32).to(dtype) if with_bias else None
    for x in (wide[:, 0].contiguous(), wide[:, 1]):
        y = packed(x, bias)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, 40), dtype, True)
        torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=TYPES[dtype], atol=10 * TYPES[dtype])


def test_rows_of_a_packed_product_are_independent() -> None:
    packed, weight = product(torch.float32)
    x = torch.ones(5, 24)
    x[3] = torch.nan
    y = packed(x, None)
    assert y.isnan().all(1).tolist() == [False, False, False, True, False]
    torch.testing.assert_close(y[4], weight.sum(1), rtol=1e-5, atol=1e-5)


def test_few_kernels_serve_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = product(torch.float32)
    computed: list[int] = []
    real = onednn._product

    def counting(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        computed.append(len(x))
        return real(x, *others)

    monkeypatch.setattr(onednn, "_product", counting)
    for rows in [*range(1, 300), 511, 1023, 1025, 5000]:
        computed.clear()
        assert len(packed(torch.zeros(rows, 24), None)) == rows
        assert set(computed) <= set(onednn.ROWS)
        assert rows <= sum(computed) <= 2 * rows


def test_float32_is_left_to_mkl_on_its_makers_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = product(torch.float32)
    monkeypatch.setattr(onednn, "_is_intel", lambda: True)
    assert onednn.can_pack(weight) is not torch.backends.mkl.is_available()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_and_other_processors_have_torchs_products(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not onednn.can_pack(torch.zeros(4, 4, dtype=dtype))
    assert not onednn.can_pack(torch.zeros(4, 4, device="meta"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    weight = torch.arange(12.0).view(3, 4)
    plain = float_product(TorchOps(), weight)
    assert isinstance(plain, Plain)
    assert torch.equal(plain(torch.eye(4), None), weight.t())
