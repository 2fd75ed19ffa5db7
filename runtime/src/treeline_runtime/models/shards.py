"""The division of a model among the ranks of a group. No torch here.

A stage of a pipeline has a range of the layers, and its ranks share each of them. A rank has some attention heads, and
a part of each feed-forward and each expert: of a projection that reads the residual stream some outputs, of one that
writes to it some inputs. So the ranks' results add up to the layer's. Or a rank has some experts as a whole, and adds
nothing for the others. Every rank has the whole router and all norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.quantization.scheme import BLOCK
from treeline_runtime.models.settings import ModelError

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a projection's weights."""


class Cut(NamedTuple):
    """A part of a tensor: ranges of one dimension, joined."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """The begin and end of each."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        size = sum(end - begin for begin, end in self.ranges)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def runs(self, whole: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
        """The part's bytes within those of a row-major tensor, in order: begin and size of each run."""
        inner, size = prod(whole[self.dim + 1 :]) * itemsize, whole[self.dim]
        for outer in range(prod(whole[: self.dim])):
            for begin, end in self.ranges:
                yield (outer * size + begin) * inner, (end - begin) * inner


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes of a model: of `count` that share each layer of a stage, numbered from 0."""

    index: int
    count: int
    stage: int = 0
    stages: int = 1

    @classmethod
    def of(cls, number: int, tp_size: int, pp_size: int) -> Rank:
        """number: among all, stage by stage."""
        return cls(number % tp_size, tp_size, number // tp_size, pp_size)

    @property
    def number(self) -> int:
        return self.stage * self.count + self.index

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """The stage's part of so many layers; the first stages have one more if they are not equal."""
        size, more = divmod(count, self.stages)
        first = self.stage * size + min(self.stage, more)
        return range(first, first + size + (self.stage < more))

    def part(self, size: int) -> tuple[int, int]:
        """Begin and end of the rank's part of `size` things, of which all ranks have equally many. If there are fewer
        things than ranks, neighbours share one."""
        if size < self.count:
            shared = self.index * size // self.count
            return shared, shared + 1
        return self.index * size // self.count, (self.index + 1) * size // self.count

    def rows(self, vocabulary: int) -> tuple[int, int]:
        """Begin and end of the rank's rows of a vocabulary: as many as the other ranks have, or fewer at its end."""
        size = -(-vocabulary // self.count)
        return min(self.index * size, vocabulary), min((self.index + 1) * size, vocabulary)

    def cut(self, dim: int, *sizes: int, unit: int = 1) -> Cut | None:
        """The rank's part of each section of a dimension; a unit, such as a head, stays whole. None: all of it."""
        if self.count == 1:
            return None
        ranges, start = [], 0
        for size in sizes:
            begin, end = self.part(size // unit)
            ranges.append((start + begin * unit, start + end * unit))
            start += size
        return Cut(dim, tuple(ranges))


WHOLE = Rank(0, 1)
"""The only rank, which has all of a model."""


def check_ranks(config: ModelConfig, count: int, stages: int = 1, ep_size: int = 1) -> None:
    """Raises ModelError if `count` ranks cannot share each of `stages` stages; it names what they cannot divide.
    ep_size: the ranks over which whole experts are divided; 1: each rank has a part of every expert."""
    if stages > config.num_layers:
        raise ModelError(
            f"{config.architecture} has {config.num_layers} layers: --pp-size {stages} leaves a stage without one"
        )
    if (config.vision is not None or config.audio is not None) and max(count, stages, ep_size) > 1:
        what = "images" if config.vision is not None else "sound"
        raise ModelError(
            f"{config.architecture} reads {what}, which is not supported on several ranks: leave --tp-size, --pp-size "
            "and --ep-size out"
        )
    heads, kv_heads, moe = config.num_heads, config.num_kv_heads, config.moe
    shared = {"attention heads": heads}
    if moe is None or len(moe.layers) < config.num_layers:
        shared["elements of the feed-forward (intermediate_size)"] = config.intermediate_size
    if moe is not None:
        if ep_size == 1:
            shared["elements of an expert"] = moe.intermediate_size
        elif moe.num_experts % ep_size:
            raise ModelError(
                f"{config.architecture} has {moe.num_experts} experts, which --ep-size {ep_size} does not divide"
            )
        shared["elements of the shared expert"] = moe.shared_intermediate_size
    elif ep_size > 1:
        raise ModelError(f"{config.architecture} has no experts: leave --ep-size out")
    for what, size in shared.items():
        if size % count:
            raise ModelError(f"{config.architecture} has {size} {what}, which --tp-size {count} does not divide")
    if kv_heads % count and count % kv_heads:
        raise ModelError(
            f"{config.architecture} has {kv_heads} key/value heads: --tp-size must divide them or be a multiple of "
            f"them, and {count} is neither"
        )
    if count > 1 and config.quantization is not None and config.quantization.weights == "blocks":
        inputs = {"attention": heads * config.head_dim, "feed-forward": config.intermediate_size}
        for what, size in inputs.items():
            if size // count % BLOCK:
                raise ModelError(
                    f"--tp-size {count} gives a rank {size // count} of the {what}'s {size} elements, which are no "
                    f"whole blocks of {BLOCK} (weight_block_size): take fewer ranks, or a checkpoint with a scale per "
                    "channel"
                )


def own(config: ModelConfig, rank: Rank, ep_size: int = 1) -> ModelConfig:
    """The sizes of one rank's part, and its layers, numbered within its stage. The vocabulary and the number of experts
    remain the model's. ep_size: see `check_ranks`."""
    moe, count = config.moe, rank.count
    layers = rank.layers(config.num_layers)
    if moe is not None:
        moe = replace(
            moe,
            layers=frozenset(layer - layers.start for layer in moe.layers if layer in layers),
            intermediate_size=moe.intermediate_size // (count if ep_size == 1 else 1),
            shared_intermediate_size=moe.shared_intermediate_size // count,
        )
    return replace(
        config,
        num_layers=len(layers),
        scoring=replace(config.scoring, windows=config.scoring.windows[layers.start : layers.stop]),
        num_heads=config.num_heads // count,
        num_kv_heads=max(config.num_kv_heads // count, 1),
        # an unused one, where all layers have experts, may be any number
        intermediate_size=max(config.intermediate_size // count, 1),
        moe=moe,
    )
