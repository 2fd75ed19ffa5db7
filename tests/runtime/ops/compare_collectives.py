"""Compares the sums and gathers of `SymmetricMemory` with plain torch, in and out of CUDA graphs, and prints the cases.
On CUDA; two ranks may share one GPU here."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch
import torch.multiprocessing
from treeline_runtime.collectives import BUFFER_BYTES, SymmetricMemory, open_store
from treeline_runtime.models.shards import Rank
from treeline_runtime.ops import ops_for

RANKS = 2
CASES = ((3, 64, torch.float32), (257, 4096, torch.bfloat16), (5000, 8192, torch.bfloat16))
"""Rows of a rank, columns, type: the last one is more than the ranks' buffers hold."""


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=2e-2)


LAYERS = 200
"""Calls of `add_norm` one after the other, with nothing between them that waits for the other rank."""


def sums_with_norms(ranks: SymmetricMemory, device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    """Compares `add_norm` with a sum and then a norm, of new numbers in each call, in and out of a graph."""
    ops = ops_for(device)
    generator = torch.Generator(device=device).manual_seed(ranks.rank.index)
    shared = torch.Generator(device=device).manual_seed(9)
    weight = torch.randn(size, generator=shared, device=device).to(dtype)
    stream = torch.randn(rows, size, generator=shared, device=device).to(dtype)
    given = torch.randn(2, rows, size, generator=generator, device=device).to(dtype)

    def fused(residual: torch.Tensor) -> torch.Tensor:
        y = residual
        for call in range(LAYERS):
            room = ranks.room(y, call % 2)
            x = torch.add(given[call % 2], y, alpha=call / LAYERS, out=room)
            y, _ = ranks.add_norm(ops, x, room, residual, weight, 1e-5, None)
        return y

    def apart(residual: torch.Tensor) -> torch.Tensor:
        y = residual
        for call in range(LAYERS):
            x = torch.add(given[call % 2], y, alpha=call / LAYERS)
            y, _ = ops.add_norm(ranks.sum(x).clone(), residual, weight, 1e-5, None)
        return y

    expected, found = apart(stream.clone()), fused(stream.clone())
    assert torch.equal(found, expected), (found - expected).abs().max()
    residual, graph = stream.clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = fused(residual)
    for _ in range(3):
        residual.copy_(stream)
        graph.replay()
        assert torch.equal(captured, expected)


def rank(index: int, place: str) -> None:
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    ranks = SymmetricMemory(Rank.of(index, RANKS, 1), "compared", open_store(place, RANKS), device)
    for rows, columns, dtype in CASES:
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (RANKS * rows, columns)
        each = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(RANKS)]
        mine, total = each[index], torch.stack(each).float().sum(0)
        firsts = [x[:rows] for x in each]
        near(ranks.sum(mine.clone()), total)
        near(ranks.reduce_scatter(mine.clone()), total[index * rows : (index + 1) * rows])
        assert torch.equal(ranks.all_gather(mine[:rows].clone()), torch.cat(firsts))
        gathered = ranks.gather(mine[:rows].clone())
        assert index or torch.equal(gathered, torch.cat(firsts, dim=1))
        assert torch.equal(ranks.first(mine[:3].clone()), each[0][:3])

        if mine[:rows].nbytes <= BUFFER_BYTES:
            sums_with_norms(ranks, device, dtype, rows, columns)
        x, graph = mine[:rows].clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = ranks.all_gather(x)
            added = ranks.reduce_scatter(captured)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, torch.cat(firsts))
        near(added, RANKS * x.float())
        if index == 0:
            sys.stdout.write(f"{rows} x {columns} {dtype}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (str(Path(folder) / "ranks"),), nprocs=RANKS)
