"""Compares what the kernel forbids with the reference, bit by bit. On CUDA, or in the interpreter."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from treeline_runtime.ops.torch_ops import TorchOps  # noqa: E402
from treeline_runtime.ops.triton_ops import VOCAB_BLOCK, TritonOps  # noqa: E402
from treeline_runtime.sampling import mask_words  # noqa: E402


def compare(rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator)
    logits[0, 0], logits[0, vocab - 1] = torch.nan, torch.inf
    masks = torch.randint(-(1 << 31), 1 << 31, (rows, mask_words(vocab)), dtype=torch.int32, generator=generator)
    masks[rows - 1] = 0
    for bits in (masks, torch.full_like(masks, -1)):
        found, expected = (logits.to(DEVICE, copy=True) for _ in range(2))
        TritonOps().forbid(found, bits.to(DEVICE))
        TorchOps().forbid(expected, bits.to(DEVICE))
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (rows, vocab)


if __name__ == "__main__":
    for vocab in (1, 31, 32, 33, 50, VOCAB_BLOCK - 1, VOCAB_BLOCK, VOCAB_BLOCK + 1, 9000):
        compare(1, vocab)
        compare(5, vocab)
