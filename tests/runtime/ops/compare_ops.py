"""Compares every kernel with the reference, prints what it compared. On CUDA, or else in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from treeline_runtime.attention import Layout  # noqa: E402
from treeline_runtime.attention.decode import Decode  # noqa: E402
from treeline_runtime.attention.extend import Extend  # noqa: E402
from treeline_runtime.attention.torch_sdpa import TorchSDPA  # noqa: E402
from treeline_runtime.core import Context  # noqa: E402
from treeline_runtime.kvcache import KVPool  # noqa: E402
from treeline_runtime.models.quantization.fp8 import E4M3, dequantise, quantise, quantise_weight  # noqa: E402
from treeline_runtime.ops import Heads, fp8, kernels  # noqa: E402
from treeline_runtime.ops.torch_ops import TorchOps  # noqa: E402
from treeline_runtime.ops.triton_ops import TritonOps  # noqa: E402
from treeline_runtime.sampling.noise import row_keys  # noqa: E402

FUSED, REFERENCE = TritonOps(), TorchOps()
CONVERTS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
"""GPUs before Ada do not."""


def _mend_the_interpreter() -> None:
    """Triton 3.9's interpreter makes 16 of 31.9 as fp8: it rounds the mantissa up and forgets the carry. So conversions
    from and to fp8 are torch's there; on a GPU they are the device's."""
    from triton import language as tl
    from triton.runtime import interpreter

    theirs = interpreter._convert_float
    kinds = {tl.float8e4nv: E4M3, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32}

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return theirs(data, source, target, mode)
        size = target.primitive_bitwidth // 8
        numbers = torch.from_numpy(np.frombuffer(data.tobytes(), np.uint8).copy()).view(kinds[source])
        converted = numbers.to(kinds[target]).view(torch.uint8).numpy()
        return converted.view(f"uint{8 * size}").reshape(data.shape)

    interpreter._convert_float = convert


if DEVICE == "cpu":
    _mend_the_interpreter()
GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    exact = dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-5 if exact else 2e-2, atol=2e-5 if exact else 2e-2)


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
        expected = REFERENCE.add_norm(x, residual, weight, 1e-5)
        found = FUSED.add_norm(x, residual.clone(), weight, 1e-5)
        close(found[0], expected[0], dtype)
        close(found[1], expected[1], dtype)


def gate(dtype: torch.dtype) -> None:
    for size in (8, 1500):
        x = noise(3, 2 * size, dtype=dtype)
        close(FUSED.gate(x), REFERENCE.gate(x), dtype)


SCALES = [(0.5, 0.25), (0.03, 2.0)]
"""Of keys and values of two layers."""


def a_context(
    heads: Heads, tokens: int, dtype: torch.dtype, slots: torch.Tensor, stored: torch.dtype | None = None
) -> Any:
    device = torch.device(DEVICE)
    pool = KVPool(
        num_layers=2, num_pages=9, page_size=4, num_kv_heads=heads.kv, head_dim=heads.dim, dtype=dtype, device=device,
        stored=stored, scales=SCALES,
    )  # fmt: skip
    angles = torch.arange(tokens)[:, None] * torch.linspace(1, 0.01, heads.dim // 2)
    cos, sin = angles.cos(), angles.sin()
    return Context(
        SimpleNamespace(pool=pool),  # type: ignore[arg-type]
        None,
        slots,
        torch.cat((cos, cos), 1)[:, None].to(DEVICE, dtype),
        torch.cat((-sin, sin), 1)[:, None].to(DEVICE, dtype),
        torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
    )


def rotate_and_store(dtype: torch.dtype) -> None:
    for query, kv, dim, with_norm in ((8, 2, 64, False), (3, 1, 16, True), (16, 8, 128, True), (4, 4, 24, False)):
        weights = noise(query + kv, dim, dtype=dtype) if with_norm else None
        heads = Heads(query, kv, dim, weights, 1e-6)
        tokens = 6
        slots = torch.randperm(36, generator=GENERATOR)[:tokens].to(DEVICE)
        qkv = noise(tokens, (query + 2 * kv) * dim, dtype=dtype)
        ours, theirs = (a_context(heads, tokens, dtype, slots) for _ in range(2))
        found = FUSED.rotate_and_store(qkv.clone(), heads, 1, ours)
        expected = REFERENCE.rotate_and_store(qkv.clone(), heads, 1, theirs)
        for mine, other in zip(found, expected, strict=True):
            close(mine, other, dtype)
        for layer in (0, 1):
            close(ours.attention.pool.keys[layer], theirs.attention.pool.keys[layer], dtype)
            close(ours.attention.pool.values[layer], theirs.attention.pool.values[layer], dtype)
        assert FUSED.stored_finite(ours).all()
        for token, head in ((1, query), (4, query + 2 * kv - 1)):  # a key, a value
            for wrong in (torch.nan, torch.inf, -torch.inf):
                broken = qkv.clone()
                broken[token, head * dim + 3] = wrong
                context = a_context(heads, tokens, dtype, slots)
                FUSED.rotate_and_store(broken, heads, 0, context)
                assert FUSED.stored_finite(context).tolist() == [i != token for i in range(tokens)]


def rotate_and_store_fp8(dtype: torch.dtype) -> None:
    """What is stored is the reference's to the bit, but where the unrounded numbers differ in their last bits."""
    if not CONVERTS_FP8:
        return
    heads, tokens = Heads(8, 2, 64, None, 1e-6), 6
    slots = torch.randperm(36, generator=GENERATOR)[:tokens].to(DEVICE)
    qkv = noise(tokens, 12 * 64, dtype=dtype)
    qkv[2] *= 1e4  # beyond the largest e4m3
    ours, theirs = (a_context(heads, tokens, dtype, slots, E4M3) for _ in range(2))
    for layer in (0, 1):
        FUSED.rotate_and_store(qkv.clone(), heads, layer, ours)
        REFERENCE.rotate_and_store(qkv.clone(), heads, layer, theirs)
        for kind in ("keys", "values"):
            found, expected = (getattr(c.attention.pool, kind)[layer].float() for c in (ours, theirs))
            assert expected.abs().max() == 448
            assert (found == expected).float().mean() > (0.999 if dtype == torch.float32 else 0.95)
            if dtype == torch.float32:  # the reference rounds to the model's dtype before it divides by the scale
                torch.testing.assert_close(found, expected, rtol=0.13, atol=2**-8)
    assert FUSED.stored_finite(ours).all()
    assert REFERENCE.stored_finite(theirs).all()
    for column in ((8 + 1) * 64 + 5, (8 + 3) * 64 + 40):  # a key, a value
        for wrong in (torch.nan, torch.inf, -torch.inf):
            broken = qkv.clone()
            broken[3, column] = wrong
            for ops in (FUSED, REFERENCE):
                context = a_context(heads, tokens, dtype, slots, E4M3)
                ops.rotate_and_store(broken.clone(), heads, 0, context)
                assert ops.stored_finite(context).tolist() == [i != 3 for i in range(tokens)]


def quantise_fp8(dtype: torch.dtype) -> None:
    """Activations become the fp8 that they become by definition; a row that is not finite says so."""
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
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        found = dequantise(values, scales, group)
        assert (values.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.99
        torch.testing.assert_close(found, dequantise(expected, expected_scales, group), rtol=0.13, atol=1e-3)
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
                torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=4e-2)
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


def pages() -> None:
    table = torch.arange(5 * 2000).view(5, 2000).to(DEVICE)
    rows, counts = torch.tensor([3, 0, 4]), [1, 1500, 1025]
    indptr = torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)).to(DEVICE)
    out = torch.full((sum(counts),), -1, dtype=torch.int32, device=DEVICE)
    kernels.flatten_pages[(3, 2)](table, rows.to(DEVICE), indptr, out, 2000, BLOCK=1024)
    expected = torch.cat([table[row, :count] for row, count in zip(rows, counts, strict=True)])
    assert torch.equal(out, expected.int())


def decode(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """The kernel of decode against attention in float64: any lengths, any number of shares, NaN where nobody looks."""
    random, device = Random(0), torch.device(DEVICE)
    shapes = ((8, 2, 64), (6, 1, 24), (4, 4, 128))
    batches = ([1], [19], [7] * 3, [2, 301, 4, 91], [128, 1, 129, 64, 5, 256, 2, 3, 130])
    for query, kv, dim in shapes if stored is None else shapes[:2]:
        for lens in batches if stored is None else batches[2:4]:
            page_size = random.choice([1, 16])
            counts = [-(-n // page_size) for n in lens]
            pool = KVPool(
                num_layers=1,
                num_pages=sum(counts),
                page_size=page_size,
                num_kv_heads=kv,
                head_dim=dim,
                dtype=dtype,
                device=device,
                stored=stored,
                scales=SCALES[:1],
            )
            for part in (pool.keys[0], pool.values[0]):
                if stored is None:
                    part.fill_(torch.nan)
                else:
                    part.view(torch.uint8).fill_(0x7F)
            backend = Decode(TorchSDPA(pool, query, kv, dim))
            free = torch.randperm(sum(counts), generator=GENERATOR)
            table = torch.zeros(len(lens) + 2, max(counts), dtype=torch.int64)
            rows = torch.randperm(len(lens) + 2, generator=GENERATOR)[: len(lens)]
            q, expected = noise(len(lens), query, dim, dtype=dtype), []
            for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
                pages, free = free[:count], free[count:]
                table[rows[i], :count] = pages
                tokens = torch.arange(n)
                k, v = noise(n, kv, dim, dtype=dtype), noise(n, kv, dim, dtype=dtype)
                slots = pages[tokens // page_size] * page_size + tokens % page_size
                pool.store(0, slots.to(DEVICE), k, v)
                if stored is not None:
                    k, v = (
                        torch.as_tensor((x.float() / s).to(stored).float() * s)
                        for x, s in zip((k, v), SCALES[0], strict=True)
                    )
                k, v = (x.repeat_interleave(query // kv, 1).double() for x in (k, v))
                weights = (torch.einsum("hd,khd->hk", q[i].double(), k) * dim**-0.5).softmax(-1)
                expected.append(torch.einsum("hk,khd->hd", weights, v).flatten())
            layout = Layout([1] * len(lens), lens, table.to(DEVICE), rows.to(DEVICE))
            for shares in (1, 3, 16) if stored is None else (3,):
                backend._shares = shares
                for buffers in (None, backend.capture_buffers(len(lens))):
                    found = backend.forward(0, q, q, q, backend.plan(layout, buffers))
                    close(found.double(), torch.stack(expected), dtype)


def extend(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """The kernel of prompts against attention in float64: (cached, new) tokens, keys split or not, NaN outside."""
    random, device = Random(1), torch.device(DEVICE)
    batches = ([(0, 1)], [(0, 19), (300, 1), (64, 129), (5, 7)], [(63, 2), (0, 64), (127, 65)])
    for query, kv, dim in ((8, 2, 64), (6, 1, 24), (2, 2, 128))[: 3 if stored is None else 1]:
        for lens in batches if stored is None else batches[1:2]:
            page_size = random.choice([1, 16])
            counts = [-(-(cached + new) // page_size) for cached, new in lens]
            pool = KVPool(
                num_layers=1,
                num_pages=sum(counts),
                page_size=page_size,
                num_kv_heads=kv,
                head_dim=dim,
                dtype=dtype,
                device=device,
                stored=stored,
                scales=SCALES[:1],
            )
            for part in (pool.keys[0], pool.values[0]):
                if stored is None:
                    part.fill_(torch.nan)
                else:
                    part.view(torch.uint8).fill_(0x7F)
            free = torch.randperm(sum(counts), generator=GENERATOR)
            table = torch.zeros(len(lens) + 2, max(counts), dtype=torch.int64)
            rows = torch.randperm(len(lens) + 2, generator=GENERATOR)[: len(lens)]
            queries, expected = [], []
            for i, ((cached, new), count) in enumerate(zip(lens, counts, strict=True)):
                pages, free = free[:count], free[count:]
                table[rows[i], :count] = pages
                tokens = torch.arange(cached + new)
                k, v = noise(len(tokens), kv, dim, dtype=dtype), noise(len(tokens), kv, dim, dtype=dtype)
                pool.store(0, (pages[tokens // page_size] * page_size + tokens % page_size).to(DEVICE), k, v)
                q = noise(new, query, dim, dtype=dtype)
                queries.append(q)
                if stored is not None:
                    k, v = (
                        torch.as_tensor((x.float() / s).to(stored).float() * s)
                        for x, s in zip((k, v), SCALES[0], strict=True)
                    )
                k, v = (x.repeat_interleave(query // kv, 1).double() for x in (k, v))
                scores = torch.einsum("qhd,khd->hqk", q.double(), k) * dim**-0.5
                hidden = torch.ones(new, cached + new, dtype=torch.bool, device=device).triu(cached + 1)
                weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
                expected.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
            q = torch.cat(queries)
            layout = Layout([n for _, n in lens], [c + n for c, n in lens], table.to(DEVICE), rows.to(DEVICE))
            backend = Extend(pool, query, kv, dim)
            for programs in (1, 64):
                backend._programs = programs
                backend._partial = torch.full((2000, query, dim), torch.nan, device=device)
                backend._scores = torch.full((2000, query), torch.nan, device=device)
                plan = backend.plan(layout)
                assert (plan.splits > 1) == (programs > 1 and max(layout.kv_lens) > 256), plan.splits
                close(backend.forward(0, q, q, q, plan).double(), torch.cat(expected), dtype)


def decode_fp8(dtype: torch.dtype) -> None:
    if CONVERTS_FP8:
        decode(dtype, E4M3)


def extend_fp8(dtype: torch.dtype) -> None:
    if CONVERTS_FP8:
        extend(dtype, E4M3)


if __name__ == "__main__":
    fp8_too = (rotate_and_store_fp8, quantise_fp8, linear_fp8, decode_fp8, extend_fp8)
    attention = (decode, decode_fp8, extend, extend_fp8)
    for compare in (linear, norm, gate, rotate_and_store, choose, decode, extend, *fp8_too):
        run: Callable[[torch.dtype], None] = compare
        # the interpreter is slow, and multiplies no bfloat16: one of attention's types is enough there
        for dtype in (torch.float32, torch.bfloat16)[: 1 if compare in attention and DEVICE == "cpu" else 2]:
            run(dtype)
        sys.stdout.write(f"{compare.__name__}\n")
    for check in (pages, overflow):
        check()
        sys.stdout.write(f"{check.__name__}\n")
