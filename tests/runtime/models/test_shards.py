"""A projection that several ranks share: the parts, put together, equal the whole."""

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


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_gives_its_slice_of_each_projections_outputs(ranks: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    whole = random_linear(None)(x, ALONE).split([8, 4, 4], dim=1)
    own = [size // ranks for size in (8, 4, 4)]
    each = [random_linear(Shard(rank, ranks, OUTPUTS))(x, ALONE).split(own, dim=1) for rank in range(ranks)]
    for expected, *parts in zip(whole, *each, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_partial_results_of_ranks_add_up(ranks: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    parts = [
        random_linear(Shard(rank, ranks, INPUTS))(own, ALONE) for rank, own in enumerate(x.split(6 // ranks, dim=1))
    ]
    torch.testing.assert_close(sum(parts), random_linear(None)(x, ALONE))


@pytest.mark.parametrize("dim", [OUTPUTS, INPUTS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shards_of_a_checkpoints_tensor_are_the_tensor(ranks: int, dim: int) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with Checkpoint(TINY_MODEL, torch.float32, CPU) as weights:
        shape = weights.shape(name)
        parts = [weights.take(name, *shape, shard=Shard(rank, ranks, dim)) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts, dim), weights.take(name, *shape))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_a_feed_forward_with_one_sum_at_its_end(ranks: int) -> None:
    """Columns of gate and up, rows of down, from a checkpoint."""
    prefix, ops = "model.layers.0.mlp.", TorchOps()
    with Checkpoint(TINY_MODEL, torch.float32, CPU) as weights:
        inner, hidden = weights.shape(f"{prefix}up_proj.weight")
        x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1))

        def computed(shards: tuple[Shard, Shard] | tuple[None, None]) -> torch.Tensor:
            names = dict.fromkeys(("gate_proj", "up_proj"), inner)
            gate_up = Linear(weights, ops, prefix, names, hidden, bias=False, shard=shards[0])
            down = Linear(weights, ops, prefix, {"down_proj": hidden}, inner, bias=False, shard=shards[1])
            return down(ops.gate(gate_up(x, ALONE), "silu"), ALONE)

        parts = [computed((Shard(rank, ranks, OUTPUTS), Shard(rank, ranks, INPUTS))) for rank in range(ranks)]
        torch.testing.assert_close(sum(parts), computed((None, None)))


def test_unsplittable_settings_are_named() -> None:
    with pytest.raises(ModelError, match="cannot be shared by 3 ranks"):
        random_linear(Shard(0, 3, OUTPUTS))
    with pytest.raises(ModelError, match=r"x\.q_proj is quantised"):
        linear(RandomWeights(0, torch.float32, CPU, ONLINE), Shard(0, 2, OUTPUTS), bias=False)
