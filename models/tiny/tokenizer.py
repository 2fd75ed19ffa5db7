"""Trains the tiny model's tokenizer: byte-level BPE of 4096 tokens, in the layout that transformers loads.

`python tokenizer.py --out DIR` writes tokenizer.json and tokenizer_config.json; chat_template.jinja is written by hand.
The shape is that of Qwen's tokenizers: NFC normalizer, a Split on Qwen's regular expression (every digit is a token of
its own), byte-level alphabet, no BOS. The special tokens are the last three ids.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import corpus
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 4096
MAX_LENGTH = 8192
SPECIAL_TOKENS = (corpus.END_OF_TEXT, corpus.IM_START, corpus.IM_END)
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(seed: int, documents: int) -> Iterator[str]:
    """The training text: documents of the corpus without their special tokens."""
    rng = random.Random(f"tokenizer {seed}")
    for index in range(documents):
        document = corpus.long_document(rng, 3000) if index % 16 == 0 else corpus.short_document(rng)
        text = document.text + (document.completion or "")
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\x00")
        yield from (part for part in text.split("\x00") if part)


def train(seed: int = 0, documents: int = 60_000) -> Tokenizer:
    """A tokenizer trained on `documents` documents; the same one for the same arguments."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed, documents), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": corpus.IM_END,
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": corpus.END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train the tokenizer and write it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = train(arguments.seed)
    save(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
