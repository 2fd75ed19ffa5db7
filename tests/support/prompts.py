"""Prompts with shared beginnings that the tests control."""

from __future__ import annotations

import random

VOCABULARY = """
    river stone amber quiet forest lantern copper meadow signal harbour winter thread orchard glass summit paper
    anchor violet engine canyon silver garden bridge thunder pebble marble willow feather candle desert island
"""
WORDS = VOCABULARY.split()


def text(words: int, seed: int) -> str:
    """Return `words` words, the same for the same seed; texts of different seeds differ from the first words on."""
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(words))


def messages(shared: str, own: str) -> list[dict[str, str]]:
    """Return a chat with a shared system prompt and a question of its own."""
    return [{"role": "system", "content": shared}, {"role": "user", "content": own}]
