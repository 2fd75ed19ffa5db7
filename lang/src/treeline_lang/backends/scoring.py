"""`select` with a server that tells the logprobs of a given text's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from treeline_lang.choices import ChoicesMethod, Decision, TokenLogprob, tokens_of_choice
from treeline_lang.errors import BackendError


class Scorer(Protocol):
    async def count(self, text: str) -> int:
        """Tokens of a text, which is cached from then on."""

    async def score(self, texts: Sequence[str], start: int) -> list[list[TokenLogprob]]:
        """Of each text its tokens from number `start` on."""

    async def score_ids(self, ids: Sequence[Sequence[int]]) -> list[list[TokenLogprob]]:
        """Of each list of tokens all of them."""


async def select_by_logprobs(scorer: Scorer, text: str, choices: Sequence[str], method: ChoicesMethod) -> Decision:
    """The prompt is sent once, then with each choice behind it, all in one batch. Two tokens of the prompt's end are
    read too, as the tokenizer may join it with the choice's beginning."""
    start = max(await scorer.count(text) - 2, 0) if text else 0
    before = 2 if start else 0
    scored = await scorer.score([text + choice for choice in choices], start)
    tokens = [tokens_of_choice(one, choice, before) for one, choice in zip(scored, choices, strict=True)]
    if not all(tokens):
        raise BackendError("the server told no logprobs of the choices")
    alone: list[list[float]] = []
    if method.unconditional:
        ids = [[token.id for token in one if token.id is not None] for one in tokens]
        alone = [_logprobs(one) for one in await scorer.score_ids(ids)]
    decision = method.decide([_logprobs(one) for one in tokens], alone)
    listed = [[(token.logprob, token.id, token.text) for token in one] for one in tokens]
    return replace(decision, meta={**decision.meta, "input_token_logprobs": listed})


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[float]:
    """A first token has none: it counts 0."""
    return [0.0 if token.logprob is None else token.logprob for token in tokens]
