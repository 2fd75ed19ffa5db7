"""`select` with a completion API that tells no likelihoods: token by token, those that the choices go on with are made
the only ones that the model can say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from treeline_lang.choices import Decision
from treeline_lang.errors import BackendError, Unsupported

Tokenize = Callable[[str], Sequence[int]]
Say = Callable[[str, dict[int, int]], Awaitable[str]]
"""(text, the bias of tokens) → the one token that the model says next, as its text."""
BIAS: Final = 100
"""The largest there is: nothing else is said."""


async def walk(text: str, choices: Sequence[str], tokenize: Tokenize, say: Say) -> Decision:
    """The choice that greedy decoding held to the choices would write; a token that all of them go on with is not asked
    for. Raises Unsupported where a choice is the beginning of another, as no token says that a choice is over."""
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
