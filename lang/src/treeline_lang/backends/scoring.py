"""`select` with a server that tells the logprobs of a given text's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
    scored = _checked(await scorer.score([text + choice for choice in choices], start), len(choices))
    tokens = [tokens_of_choice(one, choice, before) for one, choice in zip(scored, choices, strict=True)]
    if not all(tokens):
        raise BackendError("the server told no logprobs of the choices")
    alone: list[list[TokenLogprob]] = []
    if method.unconditional:
        ids = [[token.id for token in one if token.id is not None] for one in tokens]
        alone = _checked(await scorer.score_ids(ids), len(choices))
    return method.by_tokens(choices, tokens, alone)


def _checked(scored: list[list[TokenLogprob]], count: int) -> list[list[TokenLogprob]]:
    """As servers have said it, for comparing: what is not a number is neither more nor less likely than another. Raises
    BackendError."""
    if len(scored) != count:
        raise BackendError(f"the server told the logprobs of {len(scored)} texts where {count} were asked for")
    for token in (token for one in scored for token in one):
        fits = (
            (token.logprob is None or _is_logprob(token.logprob))
            and (token.id is None or type(token.id) is int)
            and (token.text is None or isinstance(token.text, str))
        )
        if not fits:
            raise BackendError(f"the server told a logprob that is none: {str(token)[:200]}")
    return scored


def _is_logprob(value: Any) -> bool:
    """Not above 0, but for rounding; -inf is one, NaN is not."""
    return type(value) in (int, float) and value <= 1
