"""Copies between host and device that block no thread."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device in stream order; on a CPU the array itself. `array` may change at once."""
    return pinned(array, device).to(device, non_blocking=True)


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy that the device can read without waiting; on a CPU the array itself.

    torch's pinned allocator keeps a block until its copies are done. Pageable memory works for small arrays only:
    beyond 64 KB CUDA may wait for the stream, and some machines read it after the call returns.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


class Readback:
    """Tensors being copied to the host, as of now in stream order; later launches do not delay them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        if any(tensor.is_cuda for tensor in tensors):
            self._copies = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get(self) -> tuple[torch.Tensor, ...]:
        """Waits for the copies; returns the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copies
