"""Copies between host and device that no thread waits for."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, in the order of the stream; on a CPU the array itself. `array` may change at once."""
    return pinned(array, device).to(device, non_blocking=True)


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy from which the device can read without anybody waiting; on a CPU the array itself.

    torch's allocator of pinned memory keeps a block until the copies from it are done. Pageable memory would do for
    small arrays only: beyond 64 KB CUDA may wait for the stream, and some machines read it after the call returns.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


class Readback:
    """Tensors on their way to the host, as they are now in the order of the stream: what is launched later does not
    delay them."""

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

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host; waits for the copies."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copies
