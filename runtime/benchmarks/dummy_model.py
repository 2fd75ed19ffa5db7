"""A model folder of a known shape without weights, for `--load-format dummy` of Treeline, and of vLLM beside it.

    python runtime/benchmarks/dummy_model.py --shape llama8b --out /tmp/llama8b
    treeline serve /tmp/llama8b --load-format dummy

Its tokenizer has as many words as the shape's vocabulary, each a space and some letters. So every token that random
weights produce becomes text, the text becomes the same tokens again, and clients see exact lengths.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path

from engine import COMMON, SHAPES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = 4
"""Letters of a word: 26⁴ words are enough for any vocabulary here."""


def write_config(folder: Path, shape: str) -> None:
    """config.json alone: prompts are token ids then."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | COMMON))


def write_model(folder: Path, shape: str) -> None:
    """config.json and the tokenizer."""
    write_config(folder, shape)
    tokenizer(SHAPES[shape]["vocab_size"]).save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": word(0), "eos_token": word(1)}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def word(token: int) -> str:
    """A token's text without its space: its number in base 26, in letters."""
    digits = []
    for _ in range(LETTERS):
        token, digit = divmod(token, 26)
        digits.append(string.ascii_lowercase[digit])
    return "".join(reversed(digits))


def tokenizer(size: int) -> Tokenizer:
    """A tokenizer whose token i is " " + word(i); Ġ is how byte-level tokenizers write the space."""
    vocabulary = {"Ġ" + word(token): token for token in range(size)}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="Ġ" + word(0)))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    write_model(args.out, args.shape)


if __name__ == "__main__":
    main()
