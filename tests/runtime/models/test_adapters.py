"""An adapter's delta is added to a projection, and the adapter is asked for each projection by its name."""

from __future__ import annotations

import pytest
import torch
from treeline_runtime.context import Context
from treeline_runtime.models.decoder import Linear
from treeline_runtime.models.weights import RandomWeights
from treeline_runtime.ops.torch_ops import TorchOps

pytestmark = pytest.mark.deep


class LowRank:
    """One adapter for every row, on one projection."""

    def __init__(self, projection: str, down: torch.Tensor, up: torch.Tensor) -> None:
        self.projection, self.down, self.up = projection, down, up
        self.asked: list[str] = []

    def delta(self, projection: str, x: torch.Tensor) -> torch.Tensor | None:
        self.asked.append(projection)
        return x @ self.down @ self.up if projection == self.projection else None


def context(adapters: LowRank | None) -> Context:
    nothing = torch.empty(0)
    return Context(None, None, nothing, nothing, nothing, adapters=adapters)  # type: ignore[arg-type]


def test_an_adapter_gives_what_its_merged_weights_give() -> None:
    sizes = {"q_proj": (6,), "k_proj": (4,)}
    linear = Linear(RandomWeights(0, torch.float32, torch.device("cpu")), TorchOps(), "layers.0.", sizes, 8, bias=False)
    generator = torch.Generator().manual_seed(1)
    x, down, up = (torch.randn(shape, generator=generator) for shape in ((3, 8), (8, 2), (2, 10)))
    plain = linear(x, context(None))
    merged = x @ (linear._product.weight.to_dense().t() + down @ up)
    adapters = LowRank("layers.0.q_proj+k_proj", down, up)
    torch.testing.assert_close(linear(x, context(adapters)), merged)
    assert adapters.asked == ["layers.0.q_proj+k_proj"]
    torch.testing.assert_close(linear(x, context(LowRank("layers.1.q_proj+k_proj", down, up))), plain)
