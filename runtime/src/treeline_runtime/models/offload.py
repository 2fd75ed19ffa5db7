"""Moves any model's tensors to the host and back; finds them by walking its objects.

Tensors keep identity, strides and sharing, so references stay valid. CUDA graphs have captured addresses and must be
captured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from treeline_runtime import collectives

_PACKAGE = __name__.partition(".")[0]


def tensors_of(root: object) -> list[torch.Tensor]:
    """All tensors reachable from `root` by attributes of our classes and by containers, except those of a connection to
    other ranks: the others know their addresses."""
    found: list[torch.Tensor] = []
    seen: dict[int, object] = {}
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            waiting.extend(_parts(value))
    return found


def _parts(value: Any) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    module = type(value).__module__
    ours = module.partition(".")[0] == _PACKAGE and module != collectives.__name__
    return _attributes(value) if ours else ()


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def size_of(root: object) -> int:
    """Bytes of `root`'s tensors; shared memory counts once."""
    tensors = tensors_of(root)
    packed = sum(tensor.nbytes for tensor in tensors if tensor.is_mkldnn)
    return packed + sum(storage.nbytes() for storage in _storages(tensors).values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    # a packed weight (`ops.onednn`) shows no storage; it belongs to a CPU, whose memory is the host's anyway
    found = (tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


class Offloaded:
    """A model's tensors on the host; on the device they are empty until `restore`."""

    @torch.inference_mode()
    def __init__(self, model: object) -> None:
        tensors = tensors_of(model)
        self._bytes: dict[int, tuple[torch.device, torch.Tensor]] = {}
        for address, storage in _storages(tensors).items():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._bytes[address] = storage.device, whole.to("cpu", copy=True)
        self._tensors = [
            (tensor, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride())
            for tensor in tensors
            if tensor.untyped_storage().data_ptr() in self._bytes
        ]
        self.release()

    @torch.inference_mode()
    def release(self) -> None:
        """Empties them again after a `restore` that was not used."""
        for tensor, *_ in self._tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @torch.inference_mode()
    def restore(self) -> None:
        """Raises OutOfMemoryError, and then has changed nothing."""
        storages = {
            address: copy.to(device, copy=True).untyped_storage() for address, (device, copy) in self._bytes.items()
        }
        for tensor, address, offset, size, stride in self._tensors:
            there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = there.set_(storages[address], offset, size, stride)
