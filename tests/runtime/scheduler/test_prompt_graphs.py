"""Prompt steps in captured pieces give the same results as without, whatever padding computes; captures may fail."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.runtime_engine import Harness, prompt
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from treeline_runtime.scheduler import prompt_graphs
from treeline_runtime.scheduler.prompt_graphs import PromptGraphs, sizes_up_to

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
    """`torch.cuda` around captures, with a record of the streams."""

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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def graphs_of(engine: Harness, largest: int) -> PromptGraphs:
    executor = engine.executor
    executor._attention.capture_buffers = lambda _: object()  # type: ignore[method-assign]
    return PromptGraphs(executor._forward, executor._attention, executor._table, largest, torch.device("cuda"))


def captured(engine: Harness, largest: int) -> Harness:
    graphs = engine.executor._prompts = graphs_of(engine, largest)
    compute = graphs.hidden
    # on a CPU what is read back is the tensor itself, and no copy made before the next step overwrites it
    graphs.hidden = lambda *step: tuple(x.clone() for x in compute(*step))  # type: ignore[method-assign]
    for size in graphs._captured.values():
        for call in size.calls:  # attention skips a step's padding, whose memory holds old values
            with torch.inference_mode():
                call.out.fill_(float("nan"))
    return engine


def traffic(engine: Harness, seed: int) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Return each request's tokens, and all numbers that come with them."""
    rng = random.Random(seed)
    beginning = prompt(seed, 60)
    for i in range(14):
        ids = beginning[: rng.randint(1, 60)] + prompt(100 + i, rng.randint(1, 25))
        engine.submit(
            str(i), ids, max_new_tokens=rng.choice([1, 4, 9]), return_logprob=rng.random() < 0.5,
            logprob_start_len=rng.choice([-1, 0, 7]), return_hidden_states=rng.random() < 0.3,
        )  # fmt: skip
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    numbers: dict[str, list[float]] = {}
    for rid, outs in engine.outs.items():
        found = numbers[rid] = [logprob for logprob, _ in engine.logprobs(rid)]
        for out in outs:
            found += [logprob for logprob, _ in out.input_token_logprobs or () if logprob is not None]
            if out.hidden_states is not None:
                found += np.frombuffer(out.hidden_states.data, "<f4").tolist()
    return {rid: engine.tokens(rid) for rid in engine.outs}, numbers


@pytest.mark.parametrize(
    "settings", [{}, {"mixed_chunk": True, "overlap_depth": 1}, {"overlap_depth": 1, "max_total_tokens": 200}]
)
def test_captured_pieces_equal_a_whole_step(tiny: Path, cuda: FakeCuda, settings: dict[str, Any]) -> None:
    settings = {"chunked_prefill_size": 48, "enable_return_hidden_states": True, **settings}
    tokens, numbers = traffic(captured(Harness(tiny, **settings), 40), 1)
    same_tokens, same_numbers = traffic(Harness(tiny, **settings), 1)
    assert tokens == same_tokens
    for rid in numbers:
        assert numbers[rid] == pytest.approx(same_numbers[rid], abs=1e-4)
    assert FakeGraph.ended == len(sizes_up_to(40)) * 3


def test_a_failed_capture_is_ended(tiny: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device would refuse every later call, including those that free memory."""
    engine = Harness(tiny)
    original = engine.executor._forward._model.ops.gate

    def without_memory(*args: Any) -> torch.Tensor:
        if FakeGraph.ended == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    monkeypatch.setattr(engine.executor._forward._model.ops, "gate", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        graphs_of(engine, 32)
    assert not FakeGraph.under_way
    monkeypatch.undo()


def test_captures_of_a_process_share_a_stream(tiny: Path, cuda: FakeCuda) -> None:
    """cuBLAS keeps a workspace for each stream: sleeping and waking would take more memory every time."""
    engine = Harness(tiny)
    for _ in range(3):
        graphs_of(engine, 16)
    assert len(cuda.streams) == 1
