"""Compares the kernels with the reference, all or the named groups, and prints their names. On CUDA, or in the
interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from treeline_runtime.context import Context  # noqa: E402
from treeline_runtime.kvcache import KVPool  # noqa: E402
from treeline_runtime.models.model_config import ClampedGate  # noqa: E402
from treeline_runtime.models.quantization.fp8 import E4M3, dequantise, quantise, quantise_weight  # noqa: E402
from treeline_runtime.ops import (  # noqa: E402
    Experts,
    Heads,
    Tables,
    adapter_kernels,
    attention_kernels,
    fp8,
    fused_experts,
)
from treeline_runtime.ops.torch_ops import TorchOps  # noqa: E402
from treeline_runtime.ops.triton_ops import VOCAB_BLOCK, TritonOps  # noqa: E402
from treeline_runtime.sampling import mask_words  # noqa: E402
from treeline_runtime.sampling.noise import row_keys  # noqa: E402

FUSED, REFERENCE = TritonOps(), TorchOps()
CONVERTS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
"""GPUs before Ada cannot."""


if DEVICE == "cpu":
    from interpreter_mends import mend

    mend()
GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(DEVICE, dtype)


def near(found: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float, equal_nan: bool = False) -> None:
    """Compare as torch.testing.assert_close does, without its import of torch.distributed, which takes longer than most
    comparisons here."""
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    off = ~torch.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)
    assert not off.any(), (f"{off.sum()} of {off.numel()} differ", found[off][:10], expected[off][:10])


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare 16-bit results as a whole to 1 %: where numbers cancel, one rounding error is a large part of the
    result."""
    if dtype == torch.float32:
        near(found, expected, rtol=2e-5, atol=2e-5)
        return
    largest = expected.float().abs().max().item()
    near(found, expected, rtol=2e-2, atol=2e-2 * max(1.0, largest))
    off, length = ((found - expected).double().norm().item(), expected.double().norm().item())
    assert off <= 1e-2 * length, (off, length)


def linear(dtype: torch.dtype) -> None:
    for size, inputs, rows in ((8, 512, 1), (12, 1536, 1), (4100, 1024, 1), (8, 512, 2), (7, 512, 1), (8, 100, 1)):
        x, weight, bias = noise(rows, inputs, dtype=dtype), noise(size, inputs, dtype=dtype), noise(size, dtype=dtype)
        weight *= inputs**-0.5
        for given in (None, bias):
            close(FUSED.linear(x, weight, given), REFERENCE.linear(x, weight, given), dtype)


def norm(dtype: torch.dtype) -> None:
    for size in (8, 96, 1000):
        x, residual, weight = noise(5, size, dtype=dtype), noise(5, size, dtype=dtype), noise(size, dtype=dtype)
        close(FUSED.norm(x, weight, 1e-5), REFERENCE.norm(x, weight, 1e-5), dtype)
        after = noise(size)  # as 1 + weight is: float32
        close(FUSED.norm(x, after, 1e-5), REFERENCE.norm(x, after, 1e-5), dtype)
        for before, then in ((weight, None), (after, after), (None, weight)):
            expected = REFERENCE.add_norm(x, residual.clone(), before, 1e-5, then)
            found = FUSED.add_norm(x, residual.clone(), before, 1e-5, then)
            close(found[0], expected[0], dtype)
            close(found[1], expected[1], dtype)


def gate(dtype: torch.dtype) -> None:
    for size in (8, 1500):
        x = noise(3, 2 * size, dtype=dtype)
        close(FUSED.gate(x), REFERENCE.gate(x), dtype)
        close(FUSED.gate(x, "gelu_tanh"), REFERENCE.gate(x, "gelu_tanh"), dtype)


def route(dtype: torch.dtype) -> None:
    for experts, top_k, normalise in ((4, 1, False), (5, 4, True), (60, 4, False), (128, 8, True)):
        logits = 3 * noise(4, experts, dtype=dtype)
        logits[2] = 0.5  # which ones are chosen is not said
        scores, ids = FUSED.route(logits, top_k, normalise=normalise)
        expected, expected_ids = REFERENCE.route(logits, top_k, normalise=normalise)
        near(scores, expected, rtol=2e-6, atol=1e-7)
        assert all(len(set(row)) == top_k for row in ids.tolist())
        if dtype == torch.float32:  # in 16 bits some are equal
            assert torch.equal(ids[[0, 1, 3]], expected_ids[[0, 1, 3]].int())
        for wrong in (torch.nan, torch.inf, -torch.inf):
            broken = logits.clone()
            broken[1, experts - 1], broken[3] = wrong, wrong
            scores, ids = FUSED.route(broken, top_k, normalise=normalise)
            assert scores.isnan().all(1).tolist() == [False, wrong != -torch.inf, False, True]
            assert ((ids >= 0) & (ids < experts)).all()
            assert all(len(set(row)) == top_k for row in ids.tolist())


def experts(dtype: torch.dtype) -> None:
    """Tokens go to random experts, evenly, all to the first, or all to the last; every tile, sorted and not."""
    spreads: dict[str, Callable[[int, int, int], torch.Tensor]] = {
        "random": lambda tokens, count, k: torch.rand(tokens, count, generator=GENERATOR).topk(k).indices,
        "even": lambda tokens, count, k: (torch.arange(tokens * k) % count).view(tokens, k),
        "first": lambda tokens, count, k: torch.arange(k).repeat(tokens, 1),
        "last": lambda tokens, count, k: count - 1 - torch.arange(k).repeat(tokens, 1),
    }
    shapes = ((4, 1, 128, 64), (5, 2, 72, 40), (20, 4, 64, 96))
    kinds, tiles = itertools.cycle(spreads), itertools.cycle(fused_experts.TILES)
    sizes = (1, 19, 1, 2, 70, 9, 19, 1, 3)
    for (count, top_k, hidden, inner), tokens in list(zip(shapes * 3, sizes, strict=True))[
        : 9 if dtype == torch.float32 or DEVICE == "cuda" else 3
    ]:
        products = (
            noise(count, 2 * inner, hidden, dtype=dtype) * hidden**-0.5,
            noise(count, hidden, inner, dtype=dtype) * inner**-0.5,
        )
        biases = noise(count, 2 * inner, dtype=dtype), noise(count, hidden, dtype=dtype)
        weights = Experts(*products) if top_k == 1 else Experts(*products, biases, ClampedGate(1.7, 0.8))
        x, scores = noise(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k, generator=GENERATOR).to(DEVICE)
        for spread in spreads.values() if DEVICE == "cuda" else (spreads[next(kinds)],):
            ids = spread(tokens, count, top_k).to(DEVICE, torch.int32)
            expected = REFERENCE.experts(x, weights, scores, ids)
            close(FUSED.experts(x, weights, scores, ids), expected, dtype)
            for tile in fused_experts.TILES if DEVICE == "cuda" else (next(tiles),):
                close(fused_experts.compute(x, weights, scores, ids, tile, is_sorted=True), expected, dtype)
            # as on a rank with all experts but the first; with one expert it has none of the pairs' own
            rest = (part[1:].clone() for part in (weights.gate_up, weights.down))
            biases_here = None if weights.biases is None else (weights.biases[0][1:], weights.biases[1][1:])
            local = torch.tensor([count - 1, *range(count - 1)], dtype=torch.int32, device=DEVICE)
            some = Experts(*rest, biases_here, weights.clamped, local)
            expected = REFERENCE.experts(x, weights, scores * (ids != 0), ids)
            close(REFERENCE.experts(x, some, scores, ids), expected, dtype)
            close(FUSED.experts(x, some, scores, ids), expected, dtype)


def adapters(dtype: torch.dtype) -> None:
    """Rows with adapters of several ranks, one of them with nothing here, and rows without, beside plain products."""
    slots, ranks = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32), torch.tensor([8, 0, 24], dtype=torch.int32)
    for widths, inputs in (((300,), 100), ((700, 20), 2304), ((512, 64, 64), 4096)):
        x, y = noise(5, inputs, dtype=dtype), noise(5, sum(widths) + 8, dtype=dtype)[:, :-8]
        a = noise(3, 24, len(widths), inputs, dtype=dtype) * inputs**-0.5
        b = noise(3, 24, sum(widths), dtype=dtype)
        expected = y.double()
        for row, slot in enumerate(slots.tolist()):
            rank = int(ranks[slot]) if slot >= 0 else 0
            lows = torch.einsum("rpi,i->pr", a[slot, :rank].double(), x[row].double())
            for out, part, low in zip(expected[row].split(widths), b[slot].split(widths, 1), lows, strict=True):
                out += low @ part[:rank].double()
        adapter_kernels.add_low_rank(x, y, a, b, widths, slots.to(DEVICE), ranks.to(DEVICE))
        close(y, expected.to(dtype), dtype)


def softcap(dtype: torch.dtype) -> None:
    x = 40 * noise(3, 1500, dtype=dtype)
    expected = REFERENCE.softcap(x.clone(), 30.0)
    assert FUSED.softcap(x, 30.0) is x
    close(x, expected, dtype)


SCALES = [(0.5, 0.25), (0.03, 2.0)]
"""Scales of keys and values of two layers."""


def a_context(
    heads: Heads,
    tokens: int,
    dtype: torch.dtype,
    slots: torch.Tensor,
    rotary: int = 0,
    stored: torch.dtype | None = None,
) -> Any:
    """Return a context with two ropes; rotary: elements of a head that they turn, 0 = all."""
    device = torch.device(DEVICE)
    pool = KVPool(
        num_layers=2, num_pages=9, page_size=4, num_kv_heads=heads.kv, head_dim=heads.dim, dtype=dtype, device=device,
        stored=stored, scales=SCALES,
    )  # fmt: skip
    angles = torch.arange(tokens)[:, None] * torch.linspace(1, 0.01, (rotary or heads.dim) // 2)
    angles = torch.stack((angles, 0.3 * angles))[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    return Context(
        SimpleNamespace(pool=pool),  # type: ignore[arg-type]
        None,
        slots,
        torch.cat((cos, cos), -1).to(DEVICE, dtype),
        torch.cat((-sin, sin), -1).to(DEVICE, dtype),
        torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
    )


def cells(dtype: torch.dtype) -> None:
    """Check the cells that a step reads from the tables, and those that it writes."""
    tokens, pages = torch.randint(0, 999, (5, 61), generator=GENERATOR), torch.randperm(5 * 15).view(5, 15)
    cos, sin = noise(2, 60, 24, dtype=dtype), noise(2, 60, 24, dtype=dtype)
    plain = Tables(tokens.to(DEVICE), pages.to(DEVICE), 4, cos, sin)
    turned = dataclasses.replace(plain, deltas=torch.tensor([0, -3, -59, -70, 0], device=DEVICE))
    for tables, count in itertools.product((plain, turned), (1, 2, 7)):
        where = torch.stack((torch.randperm(5)[torch.arange(count) % 5], torch.randint(0, 60, (count,))))
        rows, positions = where.to(DEVICE, torch.int32)
        for mine, other in zip(*(ops.look_up(rows, positions, tables) for ops in (FUSED, REFERENCE)), strict=True):
            assert torch.equal(mine, other)
        ids = torch.arange(count, device=DEVICE) + 7
        written = [tables.tokens.clone() for _ in range(2)]
        positions = torch.arange(count, dtype=torch.int32, device=DEVICE)  # no cell twice
        for ops, table in zip((FUSED, REFERENCE), written, strict=True):
            ops.put(ids, table[:, 1:], rows, positions)
        assert torch.equal(*written)
        assert not torch.equal(written[0], tables.tokens)


def rotate_and_store(dtype: torch.dtype) -> None:
    for query, kv, dim, rotary, with_norm, over_heads in (
        (8, 2, 64, 64, False, False),
        (3, 1, 16, 16, True, False),
        (16, 8, 128, 128, True, False),
        (4, 4, 24, 24, False, False),
        (4, 2, 256, 256, True, False),  # Gemma
        (6, 2, 128, 96, False, False),  # Phi-4-mini
        (3, 1, 24, 8, True, False),
        (5, 3, 24, 24, True, True),  # OLMo 2
    ):
        weights = noise(query + kv, dim, dtype=torch.float32 if dim == 256 else dtype) if with_norm else None
        heads = Heads(query, kv, dim, weights, 1e-6, over_heads, rope=query % 2)
        tokens = 6
        slots = torch.randperm(36, generator=GENERATOR)[:tokens].to(DEVICE)
        qkv = noise(tokens, (query + 2 * kv) * dim, dtype=dtype)
        ours, theirs = (a_context(heads, tokens, dtype, slots, rotary) for _ in range(2))
        found = FUSED.rotate_and_store(qkv.clone(), heads, 1, ours)
        expected = REFERENCE.rotate_and_store(qkv.clone(), heads, 1, theirs)
        for mine, other in zip(found, expected, strict=True):
            close(mine, other, dtype)
        for layer in (0, 1):
            close(ours.attention.pool.keys[layer], theirs.attention.pool.keys[layer], dtype)
            close(ours.attention.pool.values[layer], theirs.attention.pool.values[layer], dtype)
        assert FUSED.stored_finite(ours).all()
        if query != 3 and DEVICE == "cpu":
            continue  # the interpreter is slow
        for token, head in ((1, query), (4, query + 2 * kv - 1)):  # a key, a value
            for wrong in (torch.nan, torch.inf, -torch.inf):
                broken = qkv.clone()
                broken[token, head * dim + 3] = wrong
                context = a_context(heads, tokens, dtype, slots, rotary)
                FUSED.rotate_and_store(broken, heads, 0, context)
                assert FUSED.stored_finite(context).tolist() == [i != token for i in range(tokens)]


def rotate_and_store_fp8(dtype: torch.dtype) -> None:
    """Stored values equal the reference's bits, except where the unrounded numbers differ in their last bits."""
    if not CONVERTS_FP8:
        return
    heads, tokens = Heads(8, 2, 64, None, 1e-6), 6
    slots = torch.randperm(36, generator=GENERATOR)[:tokens].to(DEVICE)
    qkv = noise(tokens, 12 * 64, dtype=dtype)
    qkv[2] *= 1e4  # beyond the largest e4m3
    ours, theirs = (a_context(heads, tokens, dtype, slots, stored=E4M3) for _ in range(2))
    for layer in (0, 1):
        FUSED.rotate_and_store(qkv.clone(), heads, layer, ours)
        REFERENCE.rotate_and_store(qkv.clone(), heads, layer, theirs)
        for kind in ("keys", "values"):
            found, expected = (getattr(c.attention.pool, kind)[layer].float() for c in (ours, theirs))
            assert expected.abs().max() == 448
            assert (found == expected).float().mean() > (0.999 if dtype == torch.float32 else 0.95)
            if dtype == torch.float32:  # the reference rounds to the model's dtype before it divides by the scale
                near(found, expected, rtol=0.13, atol=2**-8)
    assert FUSED.stored_finite(ours).all()
    assert REFERENCE.stored_finite(theirs).all()
    for column in ((8 + 1) * 64 + 5, (8 + 3) * 64 + 40):  # a key, a value
        for wrong in (torch.nan, torch.inf, -torch.inf):
            broken = qkv.clone()
            broken[3, column] = wrong
            for ops in (FUSED, REFERENCE):
                context = a_context(heads, tokens, dtype, slots, stored=E4M3)
                ops.rotate_and_store(broken.clone(), heads, 0, context)
                assert ops.stored_finite(context).tolist() == [i != 3 for i in range(tokens)]


def quantise_fp8(dtype: torch.dtype) -> None:
    """Activations are rounded to fp8 by definition; a row with an infinity or NaN is marked."""
    if not CONVERTS_FP8:
        return
    for columns, group, static in (
        (300, 300, None),
        (300, 128, None),
        (256, 128, None),
        (64, 128, None),
        (96, 96, 0.01),
    ):
        x = 3 * noise(5, columns, dtype=dtype)
        x[1] *= 1e-20
        x[2] = 0
        values, scales = fp8.quantise(x, group, static)
        expected, expected_scales = quantise(x, group, static)
        near(scales, expected_scales, rtol=1e-6, atol=0)
        found = dequantise(values, scales, group)
        assert (values.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.99
        near(found, dequantise(expected, expected_scales, group), rtol=0.13, atol=1e-3)
        for wrong in (torch.nan, torch.inf, -torch.inf):
            x[3, 7] = wrong
            assert fp8.quantise(x, group, static)[0][3].float().isnan().any()


def linear_fp8(dtype: torch.dtype) -> None:
    """The products against the definition in float32: few tokens and many, sizes that are no multiples of tiles."""
    if not CONVERTS_FP8:
        return
    sizes = ((1, 64, 96), (16, 300, 200), (17, 64, 256), (70, 144, 512))
    for tokens, outputs, inputs in sizes:
        x, weight, bias = (noise(*shape, dtype=dtype) for shape in ((tokens, inputs), (outputs, inputs), (outputs,)))
        for group in (inputs, 128):
            if group == inputs:
                values, scales = quantise_weight(weight * inputs**-0.5)
            else:
                values, scales = quantise(weight * inputs**-0.5, 128)
            for static, given in ((None, None), (None, bias), (0.01, bias)):
                if static and group != inputs:
                    continue
                rounded = dequantise(*quantise(x, group, static), group)
                expected = rounded @ dequantise(values, scales, group).t() + (0 if given is None else given.float())
                found = fp8.scaled_linear(x, values, scales, group, static, given)
                assert found.dtype == dtype
                # an activation that lies between two e4m3 may be rounded either way
                near(found.float(), expected, rtol=2e-2, atol=4e-2)
                assert (found.float() - expected).norm() < 8e-3 * expected.norm()


def overflow() -> None:
    """A key that float32 can hold and float16 cannot."""
    heads = Heads(1, 1, 16, None, 1e-6)
    qkv = torch.full((1, 48), 60_000.0, dtype=torch.float16, device=DEVICE)
    context = a_context(heads, 1, torch.float16, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    context.cos.fill_(0.7071)
    context.sin.fill_(0.7071)
    FUSED.rotate_and_store(qkv, heads, 0, context)
    assert not context.attention.pool.keys[0].isfinite().all()
    assert not FUSED.stored_finite(context).any()


def choose(dtype: torch.dtype) -> None:
    for vocab in (50, 9000):
        rows = 12
        logits = 3 * noise(rows, vocab, dtype=dtype)
        logits[3, 7], logits[4, :] = -torch.inf, -torch.inf
        logits[4, 5] = 1.0
        temperatures = torch.tensor([0.0, 0.7, 1.0, 0.0, 1.3, 2.0] * 2, dtype=torch.float32, device=DEVICE)
        keys = torch.from_numpy(row_keys(range(rows), range(5, 5 + rows))).to(DEVICE)
        found, finite = FUSED.choose(logits, temperatures, keys)
        expected, _ = REFERENCE.choose(logits, temperatures, keys)
        assert finite.all()
        assert torch.equal(found, expected), (found, expected)
        for wrong in (torch.nan, torch.inf):
            broken = logits.clone()
            broken[2, vocab - 1] = wrong
            broken[6, :] = -torch.inf
            assert FUSED.choose(broken, temperatures, keys)[1].tolist() == [i not in (2, 6) for i in range(rows)]


def forbid() -> None:
    """Logits are masked bit by bit."""
    for vocab in (1, 31, 32, 33, 50, VOCAB_BLOCK - 1, VOCAB_BLOCK, VOCAB_BLOCK + 1, 9000):
        for rows in (1, 5):
            logits = torch.randn(rows, vocab, generator=GENERATOR)
            logits[0, 0], logits[0, vocab - 1] = torch.nan, torch.inf
            shape = (rows, mask_words(vocab))
            masks = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=GENERATOR)
            masks[rows - 1] = 0
            for bits in (masks, torch.full_like(masks, -1)):
                found, expected = (logits.to(DEVICE, copy=True) for _ in range(2))
                FUSED.forbid(found, bits.to(DEVICE))
                REFERENCE.forbid(expected, bits.to(DEVICE))
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (rows, vocab)


def pages() -> None:
    table = torch.arange(5 * 2000).view(5, 2000).to(DEVICE)
    rows, counts = torch.tensor([3, 0, 4]), [1, 1500, 1025]
    indptr = torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)).to(DEVICE)
    out = torch.full((sum(counts),), -1, dtype=torch.int32, device=DEVICE)
    attention_kernels.flatten_pages[(3, 2)](table, rows.to(DEVICE), indptr, out, 2000, BLOCK=1024)
    expected = torch.cat([table[row, :count] for row, count in zip(rows, counts, strict=True)])
    assert torch.equal(out, expected.int())


PRODUCTS = (linear, linear_fp8, quantise_fp8, route, experts, adapters)
REST = (cells, norm, gate, softcap, rotate_and_store, rotate_and_store_fp8, choose)
GROUPS = {"products": PRODUCTS, "rest": REST}


if __name__ == "__main__":
    asked = sys.argv[1:] or GROUPS
    for compare in (compare for name in asked for compare in GROUPS[name]):
        run: Callable[[torch.dtype], None] = compare
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
        if DEVICE == "cpu" and compare is experts:  # the interpreter multiplies no bfloat16
            dtypes = (torch.float32, torch.float16)
        for dtype in dtypes:
            run(dtype)
        sys.stdout.write(f"{compare.__name__}\n")
    for check in (forbid, pages, overflow) if "rest" in asked else ():
        check()
        sys.stdout.write(f"{check.__name__}\n")
