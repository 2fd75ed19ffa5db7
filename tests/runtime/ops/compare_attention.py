"""Compares the kernels of attention with float64, all or the named groups, and prints their names. On CUDA, or
interpreted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from compare_ops import (
    CONVERTS_FP8,
    DEVICE,
    GENERATOR,
    SCALES,
    close,
    noise,
)  # before kernels: it mends the interpreter
from treeline_runtime.attention import HostPages, Layout
from treeline_runtime.attention.decode import Decode
from treeline_runtime.attention.extend import Extend
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.kvcache import KVPool
from treeline_runtime.models.model_config import PLAIN, Scoring
from treeline_runtime.models.quantization.fp8 import E4M3

RANDOM = Random(0)

WINDOWS = Scoring(windows=(100, 200), sinks=True)
CAPPED = Scoring(0.2, 1.5, (128, 1))
RULES = (
    (8, 2, 64, PLAIN),
    (6, 1, 24, PLAIN),
    (2, 2, 128, PLAIN),
    (2, 1, 256, PLAIN),
    (4, 2, 16, WINDOWS),
    (3, 1, 24, CAPPED),
)
"""(heads, kv_heads, head_dim, how scores are made)"""
FP8_RULES = (RULES[0], RULES[-1])


class Attended:
    """Sequences of (cached, new) tokens in scattered pages of two layers; everything else is NaN."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        scoring: Scoring,
        lens: list[tuple[int, int]],
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        page_size: int | None = None,
        begins_as: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        """begins_as: the first tokens of sequence i are in the pages of sequence j < i: i → (j, tokens)."""
        query, kv, dim = shape
        self.sinks = 2 * noise(query) if scoring.sinks else None
        self.scoring, self.page_size, self.stored = scoring, page_size or RANDOM.choice([1, 16]), stored
        counts = [-(-(cached + new) // self.page_size) for cached, new in lens]
        self.pool = KVPool(
            num_layers=2,
            num_pages=sum(counts),
            page_size=self.page_size,
            num_kv_heads=kv,
            head_dim=dim,
            dtype=dtype,
            device=torch.device(DEVICE),
            stored=stored,
            scales=SCALES,
        )
        for part in (*self.pool.keys, *self.pool.values):
            if stored is None:
                part.fill_(torch.nan)
            else:
                part.view(torch.uint8).fill_(0x7F)
        free = torch.randperm(sum(counts), generator=GENERATOR)
        table = torch.full((len(lens) + 2, max(counts)), int(free[0]))
        rows = torch.randperm(len(lens) + 2, generator=GENERATOR)[: len(lens)]
        self.each = []
        for i, (row, count, (cached, new)) in enumerate(zip(rows, counts, lens, strict=True)):
            pages, free = free[:count], free[count:]
            other, common = (begins_as or {}).get(i, (i, 0))
            common = common // self.page_size * self.page_size
            pages[: common // self.page_size] = table[rows[other], : common // self.page_size]
            table[row, :count] = pages
            tokens = torch.arange(cached + new)
            k, v = noise(len(tokens), kv, dim, dtype=dtype), noise(len(tokens), kv, dim, dtype=dtype)
            if common:
                k[:common], v[:common] = self.each[other][1][:common], self.each[other][2][:common]
            for layer in (0, 1):
                slots = pages[tokens // self.page_size] * self.page_size + tokens % self.page_size
                self.pool.store(layer, slots.to(DEVICE), k, v)
            self.each.append((noise(new, query, dim, dtype=dtype), k, v))
        self.q = torch.cat([q for q, _, _ in self.each])
        self.layout = Layout([n for _, n in lens], [c + n for c, n in lens], table.to(DEVICE), rows.to(DEVICE))
        self.host = HostPages(table.numpy(), rows.tolist(), 0)

    def expected(self, layer: int) -> torch.Tensor:
        """Return the result in float64: (new tokens, heads x dim)."""
        return torch.cat(
            [self._exact(q, *self._kept(layer, k, v), self.scoring.window(layer)) for q, k, v in self.each]
        )

    def _kept(self, layer: int, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Return keys and values as the cache stores them."""
        if self.stored is None:
            return list(parts)
        return [(x.float() / s).to(self.stored).float() * s for x, s in zip(parts, SCALES[layer], strict=True)]

    def _exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (self.scoring.scale or q.shape[2] ** -0.5)
        if cap := self.scoring.softcap:
            scores = cap * torch.tanh(scores / cap)
        keys = torch.arange(len(k), device=DEVICE)
        queries = keys[len(k) - len(q) :, None]
        hidden = (keys > queries) | (keys <= queries - (window or len(k)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v).flatten(1)


def decode(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """The kernel of decode: any lengths, any number of shares."""
    for *shape, scoring in RULES if stored is None else FP8_RULES:
        for lens in ([1], [19], [7] * 3, [2, 301, 4, 91], [128, 1, 129, 64, 5, 256, 2, 3, 130]):
            if DEVICE == "cpu" and (lens != [19] if 256 in shape else scoring is not PLAIN and len(lens) < 4):
                continue  # the interpreter is slow
            if stored is not None and len(lens) not in (3, 4):
                continue
            world = Attended(tuple(shape), scoring, [(n - 1, 1) for n in lens], dtype, stored)
            backend = Decode(TorchSDPA(world.pool, shape[0], scoring))
            for layer in range(len(scoring.kinds)):
                expected = world.expected(layer)
                for shares, captured in ((1, True), (3, False), (13, True)):
                    backend._shares = shares
                    buffers = backend.capture_buffers(len(lens)) if captured else None
                    plan = backend.plan(world.layout, buffers)
                    found = backend.forward(layer, world.q, world.q, world.q, plan, world.sinks)
                    close(found.double(), expected, dtype)


ONE_PREFIX = (
    [161, 177, 130, 161, 200, 19, 145],
    {1: (0, 144), 2: (0, 128), 3: (0, 160), 4: (0, 160), 6: (0, 144)},
)
"""Lengths, and shared beginnings: more sequences than a tile holds, whole blocks up to the last token, which each
computes."""
NESTED = (
    [70, 150, 200, 71, 1, 149, 214],
    {1: (0, 64), 2: (1, 144), 3: (0, 64), 5: (1, 144), 6: (2, 192)},
)
"""A prefix of most sequences, longer ones of some."""
SHARING = (
    ((8, 2, 64, PLAIN), ONE_PREFIX, 16, 3, 2),
    ((8, 2, 64, PLAIN), NESTED, 1, 13, None),
    ((3, 1, 24, Scoring(0.2, 1.5)), NESTED, 24, 1, 0),
    ((2, 2, 128, PLAIN), ONE_PREFIX, 32, 13, 0),
    ((7, 1, 16, Scoring(windows=(None, 100), sinks=True)), NESTED, 16, 3, 1),
)
"""(rules, lengths, page size, shares, extra empty sequences in captured buffers; None: no buffers)"""


def decode_shared(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """Prefixes in the same pages are read once for several sequences; buffers are planned again with other prefixes."""
    for (*shape, scoring), (lens, begins_as), page_size, shares, padding in SHARING if stored is None else SHARING[2:3]:
        world = Attended(tuple(shape), scoring, [(n - 1, 1) for n in lens], dtype, stored, page_size, begins_as)
        backend = Decode(TorchSDPA(world.pool, shape[0], scoring))
        backend._shares, backend._block = shares, 16
        _decode_shared(world, backend, padding, dtype)


def _decode_shared(world: Attended, backend: Decode, padding: int | None, dtype: torch.dtype) -> None:
    lens, layout = world.layout.kv_lens, world.layout
    nobodys = next(row for row in range(len(lens) + 2) if row not in world.host.rows)
    rows = torch.cat((layout.rows, layout.rows.new_full((padding or 0,), nobodys)))
    q = torch.cat((world.q, world.q[:1].expand(padding or 0, -1, -1)))
    layout = Layout([1] * len(q), lens + [1] * (padding or 0), layout.page_table, rows, world.host)
    buffers = None if padding is None else backend.capture_buffers(len(q))
    backwards = replace(layout, kv_lens=lens[::-1] + layout.kv_lens[len(lens) :], rows=rows.clone())
    backwards.rows[: len(lens)] = layout.rows[: len(lens)].flip(0)
    backwards = replace(backwards, host=HostPages(world.host.pages, world.host.rows[::-1], 1))
    # of a step before, what is shared is known when the others come, longer by a token
    backend.plan(replace(layout, kv_lens=[max(n - 1, 1) for n in layout.kv_lens]), buffers)
    apart = _blocks(backend.plan(replace(layout, host=None), buffers))
    for given in (layout, backwards):
        plan = backend.plan(given, buffers)
        assert _blocks(plan) < apart
        for part in (plan.buffers.partial, plan.buffers.scores):
            part.fill_(torch.nan)
        for layer in range(len(backend.scoring.kinds)):
            expected = world.expected(layer)
            turned = given is backwards
            queries = torch.cat((world.q.flip(0) if turned else world.q, q[len(lens) :]))
            found = backend.forward(layer, queries, queries, queries, plan, world.sinks)[: len(lens)]
            close(found.double(), expected.flip(0) if turned else expected, dtype)


def _blocks(plan: Any) -> int:
    """Return the number of blocks read in layers without a window."""
    return int(plan.buffers.segments[0, 4 * plan.buffers.shape.most])


def extend(dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """The kernel of prompts: keys split or not."""
    for *shape, scoring in RULES if stored is None else FP8_RULES:
        for lens in ([(0, 1)], [(0, 19), (300, 1), (64, 129), (5, 7)], [(63, 2), (0, 64), (127, 65)]):
            if DEVICE == "cpu" and (len(lens) > 1 if 256 in shape else scoring is not PLAIN and len(lens) < 3):
                continue  # the interpreter is slow
            if stored is not None and len(lens) != 4:
                continue
            world = Attended(tuple(shape), scoring, lens, dtype, stored)
            backend = Extend(world.pool, shape[0], scoring)
            for programs in (1, 64):
                backend._programs = programs
                backend._partial = torch.full((2000, *shape[::2]), torch.nan, device=DEVICE)
                backend._scores = torch.full((2000, shape[0]), torch.nan, device=DEVICE)
                plan = backend.plan(world.layout)
                if programs == 1 or (len(lens) == 4 and scoring is PLAIN):
                    assert (max(plan.splits.values()) > 1) == (programs > 1), plan.splits
                for layer in range(len(scoring.kinds)):
                    found = backend.forward(layer, world.q, world.q, world.q, plan, world.sinks)
                    close(found.double(), world.expected(layer), dtype)


def decode_fp8(dtype: torch.dtype) -> None:
    if CONVERTS_FP8:
        decode(dtype, E4M3)


def decode_shared_fp8(dtype: torch.dtype) -> None:
    if CONVERTS_FP8:
        decode_shared(dtype, E4M3)


def extend_fp8(dtype: torch.dtype) -> None:
    if CONVERTS_FP8:
        extend(dtype, E4M3)


def spans(dtype: torch.dtype) -> None:
    """Prompts with spans are left to the backend that knows them."""
    world = Attended((4, 2, 16), PLAIN, [(9, 12), (5, 1), (16, 7)], dtype)
    with_spans = replace(world.layout, spans=[(2, 11), (13, 18)])
    ours, known = Decode(Extend(world.pool, 4, PLAIN)), TorchSDPA(world.pool, 4, PLAIN)
    found, expected, plain = (
        one.forward(0, world.q, world.q, world.q, one.plan(layout)).double()
        for one, layout in ((ours, with_spans), (known, with_spans), (ours, world.layout))
    )
    close(found, expected, dtype)
    close(plain, world.expected(0), dtype)
    assert not torch.allclose(found, plain, atol=0.1)


GROUPS = {
    "attention": (decode, decode_fp8, extend, extend_fp8, spans),
    "shared_prefixes": (decode_shared, decode_shared_fp8),
}


if __name__ == "__main__":
    for compare in (compare for name in sys.argv[1:] or GROUPS for compare in GROUPS[name]):
        run: Callable[[torch.dtype], None] = compare
        # the interpreter is slow, and multiplies no bfloat16: one type is enough there
        for dtype in (torch.float32,) if DEVICE == "cpu" else (torch.float32, torch.bfloat16):
            run(dtype)
        sys.stdout.write(f"{compare.__name__}\n")
