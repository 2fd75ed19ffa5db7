"""Stateless random numbers: a function of (seed, index of the output token, token id).

A hash in wrapping 32-bit integers, so that CPU and CUDA compute the same bits. Rows are independent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_ODD = (0x21F0AAAD, 0x735A2D97)
"""Multipliers of a 32-bit mixer with little bias."""
_TO_UNIT = 2.0**-31 * (1 - 2.0**-23)
"""31-bit integers → below 1: in float32 the largest must not become 1."""


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64, in wrapping arithmetic."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_keys(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.int32]:
    """Each row's seed and index → (rows, 2): a number to add, and an odd one to multiply with."""
    seed = np.array([s & _MASK for s in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    key = _mix64(_mix64(seed) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    halves = np.stack((key >> np.uint64(32), key | np.uint64(1)), axis=1)
    return halves.astype(np.uint32).view(np.int32)


def _signed(x: int) -> int:
    """The low 32 bits as a signed number."""
    x &= _MASK >> 32
    return x - (1 << 32) if x >> 31 else x


@functools.lru_cache(maxsize=8)
def _token_hashes(vocab: int, device: torch.device) -> torch.Tensor:
    """(vocab,) int32: token ids, mixed once."""
    ids = torch.arange(vocab, dtype=torch.int32, device=device)
    ids += _signed(0x9E3779B9)
    return _mix(_mix(ids))


def _xor_shifted(x: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    """x ^= x >> bits, without the sign."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """In place, a bijection of 32-bit integers."""
    scratch = torch.empty_like(x)
    _xor_shifted(x, 16, scratch)
    x.mul_(_ODD[0])
    _xor_shifted(x, 15, scratch)
    x.mul_(_ODD[1])
    _xor_shifted(x, 15, scratch)
    return x


def negative_exponentials(keys: torch.Tensor, vocab: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Negated exponential variates of rate 1, below 0 and finite: (rows, vocab) float32, or of `ids` (rows, n)."""
    hashes = _token_hashes(vocab, keys.device)
    x = (hashes if ids is None else hashes[ids]) ^ keys[:, :1]
    scratch = torch.empty_like(x)
    x.mul_(keys[:, 1:])
    _xor_shifted(x, 15, scratch)
    x.mul_(_ODD[1])
    # the upper 31 bits; small numbers keep all of them, so that unlikely tokens win, and as often as they should
    x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return x.mul(-_TO_UNIT).sub_(0.5 * _TO_UNIT).log1p_()
