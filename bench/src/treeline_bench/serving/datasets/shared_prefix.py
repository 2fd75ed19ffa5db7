"""Dataset `generated-shared-prefix`: groups of requests with a long system prompt in common."""

from __future__ import annotations

import random

from treeline_bench.serving.datasets.base import Dataset, Shape, Texts, joined, length, pick
from treeline_bench.serving.messages import Conversation, Turn


def make(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """SGLang's defaults: 64 groups × 16 prompts, 2,048 shared and 128 own tokens, 256 out, all lengths as they are."""
    groups, ratio = pick(shape.groups, 64), pick(shape.range_ratio, 1.0)
    count = groups * pick(shape.prompts_per_group, 16)
    prefixes = []
    for _ in range(groups):
        tokens = length(pick(shape.prefix_len, 2048), ratio, rng)
        prefixes.append((texts.make(tokens, rng), tokens))
    found = []
    for index in range(count):
        prefix, prefix_tokens = prefixes[index * groups // count]
        tokens = length(pick(shape.input_len, 128), ratio, rng)
        output = length(pick(shape.output_len, 256), ratio, rng)
        piece = joined([prefix, texts.make(tokens, rng)])
        found.append(Conversation([Turn(piece, prefix_tokens + tokens, output)]))
    rng.shuffle(found)
    return found


DATASET = Dataset(
    "generated-shared-prefix",
    "groups that share a system prompt (64 groups × 16 prompts, 2048 shared + 128 own tokens, 256 out)",
    frozenset({"groups", "prompts_per_group", "prefix_len", "input_len", "output_len", "range_ratio"}),
    make,
)
