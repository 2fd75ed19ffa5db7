"""Dataset `multi-turn`: conversations, each turn of which has everything said before it as its prompt."""

from __future__ import annotations

import random

from treeline_bench.serving.datasets.base import Dataset, Shape, Texts, length, pick
from treeline_bench.serving.messages import Conversation, Turn


def make(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """SGLang's multi-turn cache benchmark: 256 conversations of 5 turns, 512 tokens in and 64 out a turn."""
    ratio = pick(shape.range_ratio, 1.0)
    found = []
    for _ in range(pick(shape.num_prompts, 256)):
        turns = []
        for _ in range(pick(shape.turns, 5)):
            tokens = length(pick(shape.input_len, 512), ratio, rng)
            output = length(pick(shape.output_len, 64), ratio, rng)
            turns.append(Turn(texts.make(tokens, rng), tokens, output))
        found.append(Conversation(turns))
    return found


DATASET = Dataset(
    "multi-turn",
    "conversations whose turns contain the answers so far (256 of 5 turns, 512 in and 64 out a turn)",
    frozenset({"num_prompts", "turns", "input_len", "output_len", "range_ratio"}),
    make,
)
