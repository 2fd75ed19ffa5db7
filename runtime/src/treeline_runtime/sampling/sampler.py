"""Logits to tokens and log probabilities.

A sampled token depends only on its row: logits, parameters, the request's seed, the token's index. Batch and
retractions have no effect.

Tokens race: each has an exponential variate divided by its probability, and the smallest wins (Gumbel's trick), so
token i wins with its probability. The last bits of logits, which depend on the batch, matter only if the first two are
that close. Inverting the cumulative function would have that risk at every token's border, with the roundings of all
earlier tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treeline_runtime.messages import MAX_STOP_TOKEN_IDS, SamplingParams, TokenLogprob
from treeline_runtime.sampling.noise import negative_exponentials, row_keys
from treeline_runtime.transfer import Readback, upload


def check_sampling(params: SamplingParams, vocab_size: int) -> str | None:
    """Returns the first error in a request's parameters, in words for the user; None if they are valid."""
    wrong = {
        "max_new_tokens": params.max_new_tokens < 0,
        "min_new_tokens": params.min_new_tokens < 0,
        "temperature": not (0 <= params.temperature < math.inf),
        "top_p": not (0 <= params.top_p <= 1),
        "top_k": params.top_k < -1,
        "min_p": not (0 <= params.min_p <= 1),
        "frequency_penalty": not math.isfinite(params.frequency_penalty),
        "presence_penalty": not math.isfinite(params.presence_penalty),
        "repetition_penalty": not (0 < params.repetition_penalty < math.inf),
    }
    for name, bad in wrong.items():
        if bad:
            return f"{name} is out of range: {getattr(params, name)}"
    if params.min_new_tokens > params.max_new_tokens:
        return f"min_new_tokens {params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
    if params.min_new_tokens and params.grammar is not None:
        return "min_new_tokens beside a grammar, which decides where it ends"
    for token, bias in (params.logit_bias or {}).items():
        if math.isnan(bias) or bias == math.inf:
            return f"logit_bias of token {token} is {bias}"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        return f"stop_token_ids has {len(params.stop_token_ids)} tokens; at most {MAX_STOP_TOKEN_IDS} are looked for"
    named = {
        "logit_bias": params.logit_bias or (),
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                return f"{name} names token {token}; the vocabulary has {vocab_size}"
    if not all(params.bad_words):
        return "bad_words has one without tokens"
    return None


RANKED = 1024
"""Tokens that are sorted for top_p and min_p before the whole vocabulary is."""
ROWS_AT_ONCE = 256
"""Prompt positions whose logits exist at once."""
BLOCK = 1 << 18
"""Elements of (rows x vocabulary) computed at once, to stay in a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """The sampling parameters and history of a row of logits."""

    params: SamplingParams
    seed: int
    index: int
    """The output token's index, from 0."""
    stop_ids: frozenset[int]
    prompt_len: int
    history: torch.Tensor | None
    """(prompt_len + index,) all tokens so far; only for penalties and bad words."""


def needs_history(params: SamplingParams) -> bool:
    penalties = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(penalties or params.bad_words)


def adjusts(params: SamplingParams) -> bool:
    """Whether logits are changed before sampling."""
    return (
        needs_history(params) or bool(params.logit_bias) or params.min_new_tokens > 0 or bool(params.allowed_token_ids)
    )


def needs_more(params: SamplingParams) -> bool:
    """Whether the row needs more than `choose`: adjusted logits, or excluded tokens."""
    return adjusts(params) or (not params.greedy and _filters(params))


def choose(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that need only a temperature: see `Ops.choose`."""
    best, chosen = logits.max(-1)
    finite = best.isfinite()  # NaN anywhere in a row is its maximum
    free = temperatures.nonzero().squeeze(1)
    block = max(1, BLOCK // logits.shape[1])
    for first in range(0, len(free), block):
        part = free[first : first + block]
        chosen[part] = _draw(logits[part], temperatures[part], keys[part])
    return chosen, finite


def sample(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """logits (rows, vocabulary) float32, adjusted in place → token ids (rows,) int64. Waits for the device only if
    top_p or min_p leave more than `RANKED` tokens of a row.

    Order: penalties, bias, minimum length, exclusions; temperature; top_k, top_p of the rest, min_p.
    """
    device = logits.device
    for i, row in enumerate(rows):
        if adjusts(row.params):
            _adjust(logits[i], row)
    chosen = logits.argmax(-1)
    temperatures = upload(np.array([row.params.temperature for row in rows], dtype=np.float32), device)
    keys = upload(row_keys([row.seed for row in rows], [row.index for row in rows]), device)
    for filtered in (False, True):
        indices = [i for i, row in enumerate(rows) if not row.params.greedy and _filters(row.params) is filtered]
        if not indices:
            continue
        part = upload(np.array(indices), device)
        if filtered:
            probs = torch.softmax(logits[part].div_(temperatures[part, None]), dim=-1)
            chosen[part] = _draw_filtered(probs, keys[part], [rows[i].params for i in indices])
        else:
            chosen[part] = _draw(logits[part], temperatures[part], keys[part])
    return chosen


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    probs = torch.softmax(logits.float().div_(temperatures[:, None]), dim=-1)
    return _race(probs, negative_exponentials(keys, logits.shape[1]))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _adjust(logits: torch.Tensor, row: Row) -> None:
    """In place on (vocabulary,)."""
    params, device = row.params, logits.device
    if row.history is not None:
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            seen = torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, row.history, True)
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        if params.frequency_penalty or params.presence_penalty:
            output = row.history[row.prompt_len :]
            counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.logit_bias:
        ids = upload(np.array(list(params.logit_bias)), device)
        logits[ids] += upload(np.array(list(params.logit_bias.values()), dtype=np.float32), device)
    if row.index < params.min_new_tokens and row.stop_ids:
        logits.index_fill_(0, upload(np.array(sorted(row.stop_ids)), device), float("-inf"))
    if params.allowed_token_ids:
        ids = upload(np.array(params.allowed_token_ids), device)
        logits.copy_(torch.full_like(logits, float("-inf")).index_copy_(0, ids, logits[ids]))
    if params.bad_words:
        assert row.history is not None
        _forbid_words(logits, params.bad_words, row.history[row.prompt_len :])


def _forbid_words(logits: torch.Tensor, words: Sequence[Sequence[int]], output: torch.Tensor) -> None:
    """In place on (vocabulary,): forbids the last token of each word whose other tokens end the output."""
    fitting = [word for word in words if len(word) <= len(output) + 1]
    if not fitting:
        return
    longest = max(map(len, fitting))
    there = upload(np.array([[*[-1] * (longest - len(word)), *word] for word in fitting]), logits.device)
    begun = (there[:, :-1] == output[len(output) - longest + 1 :]) | (there[:, :-1] < 0)
    logits.index_add_(0, there[:, -1], torch.where(begun.all(1), float("-inf"), 0.0))


def _race(probs: torch.Tensor, negative_times: torch.Tensor) -> torch.Tensor:
    """probs (rows, n), not necessarily normalised → each row's winner. Probability 0 never wins."""
    return torch.div(probs, negative_times, out=negative_times).min(-1).indices


def _draw_filtered(probs: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    vocab, device = probs.shape[1], probs.device
    # what top_k leaves has to be ranked whole: top_p is a share of it
    width = min(vocab, max(p.top_k if p.top_k > 0 else RANKED for p in params))
    ordered, ids, keep = _kept(probs, params, width)
    tokens = ids.gather(1, _race(ordered, negative_exponentials(keys, vocab, ids))[:, None]).squeeze(1)
    unlimited = [i for i, p in enumerate(params) if p.top_k <= 0 or p.top_k >= vocab]
    if width < vocab and unlimited:
        last = keep[:, -1].tolist()
        if cut := [i for i in unlimited if last[i]]:  # their choice may extend beyond the ranked tokens
            ordered, ids, _ = _kept(probs[cut], [params[i] for i in cut], vocab)
            winners = _race(ordered, negative_exponentials(keys[cut], vocab, ids))
            tokens[torch.tensor(cut, device=device)] = ids.gather(1, winners[:, None]).squeeze(1)
    return tokens


def _kept(
    probs: torch.Tensor, params: list[SamplingParams], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` most likely of each row → (probabilities, 0 where excluded; token ids; whether allowed).

    Ties are ranked by token id, so that neither `width` nor other rows matter.
    """
    device = probs.device
    ordered, ids = _ranked(probs, width)
    vocab = probs.shape[1]
    top_k = upload(np.array([p.top_k if p.top_k > 0 else vocab for p in params]), device)
    # sums of all probabilities may exceed 1 by rounding: without top_p nothing is compared with them
    shares = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
    top_p = upload(np.array(shares), device)
    min_p = upload(np.array([p.min_p for p in params], dtype=np.float32), device)
    keep = torch.arange(width, device=device) < top_k[:, None]
    mass = torch.where(keep, ordered, 0.0).cumsum(-1, dtype=torch.float64)
    # of rows without top_k only the likeliest may be here, but their whole mass is known: it is 1
    total = torch.where(top_k < vocab, mass[:, -1], 1.0)
    keep &= mass - ordered < (top_p * total)[:, None]
    keep[:, 0] = True  # top_p = 0 still leaves the likeliest
    keep &= ordered >= (min_p * ordered[:, 0])[:, None]
    return torch.where(keep, ordered, 0.0), ids, keep


def _ranked(probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` most likely of each row and their ids, most likely first, ties by lower id."""
    vocab = probs.shape[1]
    if width == vocab:
        ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
        return ordered, ids
    # bits of floats that are not negative are ordered as they are; ids in the low half make all keys different
    keys = probs.view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(vocab - 1, -1, -1, device=probs.device))
    best = keys.topk(width, dim=-1).values
    ids = vocab - 1 - best.bitwise_and_((1 << 32) - 1)
    return probs.gather(1, ids), ids


class Logprobs:
    """Log probabilities of rows by the model's own distribution, before penalties, bias and temperature: of one token
    and the `top` most likely; copied from the device when asked for."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> None:
        """logits (rows, vocabulary) float32, tokens (rows,)"""
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        values = logprobs.gather(1, tokens[:, None]).squeeze(1)
        self._copies = Readback(values, tokens, best.values, best.indices)

    def get(self) -> tuple[list[TokenLogprob], list[list[TokenLogprob]]]:
        """Returns for each row its token's pair, and the `top` most likely pairs."""
        values, tokens, top_values, top_ids = (copy.tolist() for copy in self._copies.get())
        best = [list(zip(v, i, strict=True)) for v, i in zip(top_values, top_ids, strict=True)]
        return list(zip(values, tokens, strict=True)), best
