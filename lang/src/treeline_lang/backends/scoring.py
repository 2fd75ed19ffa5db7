"""`select`: with a server that tells the logprobs of a given text's tokens, and with one that does not (`walk`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from treeline_lang.choices import ChoicesMethod, Decision, TokenLogprob, tokens_of_choice
from treeline_lang.errors import BackendError, Unsupported


class Scorer(Protocol):
    async def count(self, text: str) -> int:
        """Tokens of a text, which is cached from then on."""

    async def score(self, prompts: Sequence[str] | Sequence[Sequence[int]], start: int) -> list[list[TokenLogprob]]:
        """The tokens of each prompt, a text or the ids of its tokens, from number `start` on."""


async def select_by_logprobs(scorer: Scorer, text: str, choices: Sequence[str], method: ChoicesMethod) -> Decision:
    """The prompt is sent once, then with each choice behind it, all in one batch. Two tokens of the prompt's end are
    read too, as the tokenizer may join it with the choice's beginning."""
    start = max(await scorer.count(text) - 2, 0) if text else 0
    before = 2 if start else 0
    scored = _checked(await scorer.score([text + choice for choice in choices], start), len(choices))
    tokens = [tokens_of_choice(one, choice, before) for one, choice in zip(scored, choices, strict=True)]
    if not all(tokens):
        raise BackendError("the server gave no logprobs of the choices")
    alone: list[list[TokenLogprob]] = []
    if method.unconditional:
        ids = [[token.id for token in one if token.id is not None] for one in tokens]
        alone = _checked(await scorer.score(ids, 0), len(choices))
    return method.by_tokens(choices, tokens, alone)


def _checked(scored: list[list[TokenLogprob]], count: int) -> list[list[TokenLogprob]]:
    """As servers have said it, for comparing: what is not a number is neither more nor less likely than another. Raises
    BackendError."""
    if len(scored) != count:
        raise BackendError(f"the server gave the logprobs of {len(scored)} texts where {count} were asked for")
    for token in (token for one in scored for token in one):
        fits = (
            (token.logprob is None or _is_logprob(token.logprob))
            and (token.id is None or type(token.id) is int)
            and (token.text is None or isinstance(token.text, str))
        )
        if not fits:
            raise BackendError(f"the server gave a logprob that is none: {str(token)[:200]}")
    return scored


def _is_logprob(value: Any) -> bool:
    """Not above 0, but for rounding; -inf is one, NaN is not."""
    return type(value) in (int, float) and value <= 1


# ---- token by token -------------------------------------------------------------------------------------------------

Tokenize = Callable[[str], Sequence[int]]
Say = Callable[[str, dict[int, int]], Awaitable[str]]
"""(text, the bias of tokens) → the one token that the model says next, as its text."""
BIAS: Final = 100
"""The largest there is: nothing else is said."""


async def walk(text: str, choices: Sequence[str], tokenize: Tokenize, say: Say) -> Decision:
    """The choice that greedy decoding held to the choices would write, with a completion API that tells no likelihoods:
    at each token, those with which the choices go on are made the only ones that the model can say. A token with which
    all go on is not asked for. Raises Unsupported where a choice is the beginning of another: no token ends a choice.
    """
    tokens = [tuple(tokenize(choice)) for choice in choices]
    left, depth = list(range(len(choices))), 0
    while len({tokens[i] for i in left}) > 1:
        ended = next((i for i in left if len(tokens[i]) == depth), None)
        if ended is not None:
            raise Unsupported(
                f"{choices[ended]!r} is the beginning of another choice: an API without logprobs cannot tell them apart"
            )
        coming = dict.fromkeys(tokens[i][depth] for i in left)
        said = next(iter(coming))
        if len(coming) > 1:
            prefix = _common(left, choices, tokens, depth, tokenize)
            said = _token(await say(text + prefix, dict.fromkeys(coming, BIAS)), coming, tokenize)
        left = [i for i in left if tokens[i][depth] == said]
        depth += 1
    return Decision(left[0], [1.0 if i == left[0] else 0.0 for i in range(len(choices))], {"decided_by": "logit_bias"})


def _common(
    left: Sequence[int], choices: Sequence[str], tokens: Sequence[tuple[int, ...]], depth: int, tokenize: Tokenize
) -> str:
    """The text of the tokens that all who are left begin with: the longest beginning of a choice that is these."""
    if not depth:
        return ""
    choice, known = choices[left[0]], tokens[left[0]][:depth]
    for end in range(len(choice), 0, -1):
        if tuple(tokenize(choice[:end])) == known:
            return choice[:end]
    raise Unsupported(f"the tokens of {choice!r} are not those of its beginnings: they cannot be walked one by one")


def _token(said: str, coming: Sequence[int] | dict[int, None], tokenize: Tokenize) -> int:
    first = next(iter(tokenize(said)), None)
    if first is None or first not in coming:
        raise BackendError(f"the server said {said!r}, which none of the choices goes on with: it ignores logit_bias")
    return first
