"""Dataset `sharegpt`: lengths like those of conversations with ChatGPT, made up or from a file.

Without a file, lengths are drawn from two log-normal distributions with the means that the paper of PagedAttention
(Kwon et al., 2023, figure 11) gives for ShareGPT, 161 tokens in and 338 out, and with its long tails. A file is in
ShareGPT's format: a JSON list of `{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}`;
the first question of each is the prompt, its answer says how long ours is to be. In both cases what the field leaves
out is left out: fewer than 4 tokens, prompts over 1,024, or over 2,048 together.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec

from treeline_bench.serving.datasets.base import Dataset, DatasetError, Shape, Texts, Words, pick
from treeline_bench.serving.messages import Conversation, Turn

MEAN_IN, MEAN_OUT = 161.31, 337.99
SIGMA_IN, SIGMA_OUT = 1.2, 0.9
FEWEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


class _Said(msgspec.Struct):
    value: str


class _Dialogue(msgspec.Struct):
    conversations: list[_Said] = []


def make(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    count = pick(shape.num_prompts, 1000)
    if shape.file is not None:
        return _from_file(shape.file, texts, count, rng)
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


def _from_file(path: Path, texts: Texts, count: int, rng: random.Random) -> list[Conversation]:
    if not isinstance(texts, Words):
        raise DatasetError("the prompts of a file are text: leave out --token-ids")
    try:
        dialogues = msgspec.json.decode(path.read_bytes(), type=list[_Dialogue])
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise DatasetError(f"{path.name} is not in ShareGPT's format: {error}") from None
    rng.shuffle(dialogues)
    found: list[Conversation] = []
    for dialogue in dialogues:
        if len(found) == count:
            return found
        if len(dialogue.conversations) < 2:
            continue
        prompt, answer = (said.value for said in dialogue.conversations[:2])
        tokens, output = texts.count(prompt), texts.count(answer)
        if _kept(tokens, output):
            found.append(Conversation([Turn(prompt, tokens, output)]))
    if not found:
        raise DatasetError(f"{path.name} has no conversation of {FEWEST} to {LONGEST} tokens")
    return found


DATASET = Dataset(
    "sharegpt",
    "short questions with long tails (means 161 in, 338 out), or the conversations of --file",
    frozenset({"num_prompts", "file"}),
    make,
)
