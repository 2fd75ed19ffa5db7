"""Tokens of a span see each other in both directions, in layers with and without a window."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from treeline_runtime.attention import Layout
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.kvcache import KVPool
from treeline_runtime.models.model_config import Scoring

PAGE, HEADS, KV_HEADS, DIM, WINDOW = 4, 4, 2, 8, 7
Span = tuple[int, int]
Sequence_ = tuple[int, int, list[Span]]
"""Cached tokens, new ones, and spans among the new ones."""


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Sequence[Span], window: int | None) -> torch.Tensor:
    """Attention with a mask made token by token."""
    new, total = len(q), len(k)
    seen = torch.zeros(new, total, dtype=torch.bool)
    for token in range(new):
        last = next((end - 1 for begin, end in spans if begin <= token < end), token)
        for key in range(total):
            at = total - new + token
            seen[token, key] = key <= total - new + last and (window is None or key > at - window)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def check(sequences: list[Sequence_], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"num_layers": 2, "num_pages": 64, "page_size": PAGE, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    pool = KVPool(**sizes, dtype=torch.float32, device=torch.device("cpu"))  # type: ignore[arg-type]
    backend = TorchSDPA(pool, HEADS, Scoring(windows=(WINDOW, None)))
    free = torch.randperm(64, generator=generator).tolist()
    for layer, window in enumerate((WINDOW, None)):
        tables, q, k, v, expected, spans = [], [], [], [], [], []
        for cached, new, own in sequences:
            total = cached + new
            pages = torch.tensor([free[(layer + len(tables) * 13 + i) % 64] for i in range(-(-total // PAGE))])
            where = pages[torch.arange(total) // PAGE] * PAGE + torch.arange(total) % PAGE
            mine = [torch.randn(total, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            pool.store(layer, where, mine[1], mine[2])
            first = sum(map(len, q))
            spans += [(first + begin, first + end) for begin, end in own]
            expected.append(truth(mine[0][cached:], mine[1], mine[2], own, window))
            tables.append(pages)
            for found, one in zip((q, k, v), mine, strict=True):
                found.append(one[cached:])
        layout = Layout(
            [new for _, new, _ in sequences],
            [cached + new for cached, new, _ in sequences],
            torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            torch.arange(len(sequences)),
            spans=spans,
        )
        out = backend.forward(layer, torch.cat(q), torch.cat(k), torch.cat(v), backend.plan(layout))
        np.testing.assert_allclose(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sequences",
    [
        [(0, 12, [(3, 9)])],
        [(0, 12, [(0, 12)])],
        [(9, 12, [(2, 11)])],
        [(8, 5, [(0, 5)])],
        [(4, 14, [(0, 5), (5, 9), (10, 14)])],
        [(7, 1, []), (3, 10, [(1, 9)]), (0, 6, []), (5, 1, []), (2, 8, [(0, 8)])],
    ],
)
def test_a_span_is_seen_as_a_whole(sequences: list[Sequence_]) -> None:
    check(sequences)


def test_a_span_may_cross_the_blocks_in_which_queries_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeline_runtime.attention.torch_sdpa.QUERY_BLOCK", 4)
    check([(6, 30, [(1, 12), (13, 29)]), (0, 9, [(2, 9)])])


class Ops(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_as_large_as_a_mask_comes_from_the_cpu() -> None:
    device = torch.device("meta")
    pool = KVPool(
        num_layers=1, num_pages=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=device
    )
    backend = TorchSDPA(pool, HEADS, Scoring(windows=(None,)))
    q, k, v = (torch.empty(600, heads, DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    layout = Layout([600], [600], torch.empty(1, 150, device=device), torch.empty(1, device=device), spans=[(9, 400)])
    plan = backend.plan(layout)
    with Ops() as ops:
        backend.forward(0, q, k, v, plan)
    assert any("softmax" in name for name in ops.names)
    assert not [name for name in ops.names if "_to_copy" in name]


@pytest.mark.parametrize("seed", range(30))
def test_random_spans(seed: int) -> None:
    rng = random.Random(seed)
    sequences = []
    for _ in range(rng.randint(1, 3)):
        cached, new = rng.randint(0, 15), rng.randint(1, 25)
        cuts = sorted(rng.sample(range(new + 1), min(new + 1, 2 * rng.randint(0, 2))))
        sequences.append((cached, new, list(zip(cuts[::2], cuts[1::2], strict=False))))
    check(sequences, seed)
