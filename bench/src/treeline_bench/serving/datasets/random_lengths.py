"""Dataset `random`: prompts that share nothing, of random lengths."""

from __future__ import annotations

import random

from treeline_bench.serving.datasets.base import Dataset, Shape, Texts, length, pick
from treeline_bench.serving.messages import Conversation, Turn


def make(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """SGLang's defaults: 1,000 prompts, 1,024 in and out, range ratio 0, so from 1 token on."""
    ratio = pick(shape.range_ratio, 0.0)
    found = []
    for _ in range(pick(shape.num_prompts, 1000)):
        tokens = length(pick(shape.input_len, 1024), ratio, rng)
        output = length(pick(shape.output_len, 1024), ratio, rng)
        found.append(Conversation([Turn(texts.make(tokens, rng), tokens, output)]))
    return found


DATASET = Dataset(
    "random",
    "prompts that share nothing; lengths from range ratio × length to length (1024 in, 1024 out, ratio 0)",
    frozenset({"num_prompts", "input_len", "output_len", "range_ratio"}),
    make,
)
