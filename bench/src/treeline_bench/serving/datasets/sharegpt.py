"""Dataset `sharegpt`: lengths like those of conversations with ChatGPT.

Lengths are drawn from two log-normal distributions with the means that the paper of PagedAttention (Kwon et al., 2023,
figure 11) gives for ShareGPT, 161 tokens in and 338 out, and with its long tails. What the field leaves out is left
out: fewer than 4 tokens, prompts over 1,024, or over 2,048 together.
"""

from __future__ import annotations

import math
import random

from treeline_bench.serving.datasets.base import Dataset, Shape, Texts, pick
from treeline_bench.serving.messages import Conversation, Turn

MEAN_IN, MEAN_OUT = 161.31, 337.99
SIGMA_IN, SIGMA_OUT = 1.2, 0.9
FEWEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


def make(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    count = pick(shape.num_prompts, 1000)
    found: list[Conversation] = []
    while len(found) < count:
        tokens, output = _drawn(MEAN_IN, SIGMA_IN, rng), _drawn(MEAN_OUT, SIGMA_OUT, rng)
        if _kept(tokens, output):
            found.append(Conversation([Turn(texts.make(tokens, rng), tokens, output)]))
    return found


def _drawn(mean: float, sigma: float, rng: random.Random) -> int:
    return round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))


def _kept(tokens: int, output: int) -> bool:
    return min(tokens, output) >= FEWEST and tokens <= LONGEST_PROMPT and tokens + output <= LONGEST


DATASET = Dataset(
    "sharegpt",
    "short questions with long tails (means 161 in, 338 out)",
    frozenset({"num_prompts"}),
    make,
)
