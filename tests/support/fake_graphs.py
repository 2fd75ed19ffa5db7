"""CUDA graphs without CUDA: a capture notes the operations on a CPU's tensors, a replay does them again in place."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from treeline_runtime.scheduler import prompt_graphs

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a capture cannot wait for the device"
        out = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, out))
        return out


class FakeGraph:
    """`torch.cuda.CUDAGraph`, as far as it is used."""

    under_way: ClassVar[list[FakeGraph]] = []
    ended: ClassVar[int] = 0

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._recorder = _Recorder(self._operations)

    def capture_begin(self, **_: Any) -> None:
        assert not FakeGraph.under_way, "operation not permitted when stream is capturing"
        FakeGraph.under_way.append(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        FakeGraph.under_way.remove(self)
        FakeGraph.ended += 1

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, before in self._operations:
            now = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeCuda:
    """`torch.cuda` around captures, and which streams were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[object] = []
        FakeGraph.under_way, FakeGraph.ended = [], 0
        fakes = {
            "CUDAGraph": FakeGraph,
            "Stream": self._new_stream,
            "stream": lambda _: nullcontext(),
            "graph_pool_handle": object,
            "mem_get_info": lambda _: (0, 0),
            "synchronize": lambda _: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(prompt_graphs, "_borrowed", lambda tensor: tensor)
        monkeypatch.setattr(prompt_graphs, "upload", lambda array, _: torch.from_numpy(array))
        monkeypatch.setattr(prompt_graphs, "pinned", lambda array, _: torch.from_numpy(array))
        prompt_graphs._capture_stream.cache_clear()

    def _new_stream(self, _: torch.device) -> object:
        self.streams.append(object())
        return self.streams[-1]
