"""A projection that two ranks share: their parts, put together, are the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from treeline_runtime.context import Context
from treeline_runtime.models import ModelError
from treeline_runtime.models.decoder import Linear
from treeline_runtime.models.quantization.scheme import ONLINE
from treeline_runtime.models.weights import INPUTS, OUTPUTS, Checkpoint, RandomWeights, Shard, Weights
from treeline_runtime.ops.torch_ops import TorchOps

TINY_MODEL = Path(__file__).parents[3] / "models" / "tiny"
CPU = torch.device("cpu")
NOTHING = torch.empty(0)
ALONE = Context(None, None, NOTHING, NOTHING, NOTHING)  # type: ignore[arg-type]
NAMES = {"q_proj": 8, "k_proj": 4, "v_proj": 4}


def linear(weights: Weights, shard: Shard | None, *, bias: bool = True) -> Linear:
    return Linear(weights, TorchOps(), "x.", NAMES, 6, bias=bias, shard=shard)


def random_linear(shard: Shard | None) -> Linear:
    return linear(RandomWeights(0, torch.float32, CPU), shard)


def test_each_rank_gives_its_slice_of_each_projections_outputs() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    whole = random_linear(None)(x, ALONE).split([8, 4, 4], dim=1)
    ranks = [random_linear(Shard(rank, 2, OUTPUTS))(x, ALONE).split([4, 2, 2], dim=1) for rank in range(2)]
    for expected, *parts in zip(whole, *ranks, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_what_ranks_make_of_their_slices_of_the_input_adds_up() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    parts = [random_linear(Shard(rank, 3, INPUTS))(x[:, 2 * rank : 2 * rank + 2], ALONE) for rank in range(3)]
    torch.testing.assert_close(sum(parts), random_linear(None)(x, ALONE))


@pytest.mark.parametrize("dim", [OUTPUTS, INPUTS])
def test_the_shards_of_a_checkpoints_tensor_are_the_tensor(dim: int) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with Checkpoint(TINY_MODEL, torch.float32, CPU) as weights:
        shape = weights.shape(name)
        parts = [weights.take(name, *shape, shard=Shard(rank, 2, dim)) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim), weights.take(name, *shape))


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(ModelError, match="cannot be shared by 3 ranks"):
        random_linear(Shard(0, 3, OUTPUTS))
    with pytest.raises(ModelError, match=r"x\.q_proj is quantised"):
        linear(RandomWeights(0, torch.float32, CPU, ONLINE), Shard(0, 2, OUTPUTS), bias=False)
