"""From logits to tokens.

A sampled token is a function of its row alone: the logits, the parameters, the request's seed, the token's index.
Whatever else is in the batch, and however often a request is retracted, it draws the same numbers.

Tokens race: each has an exponential variate, divided by its probability, and the smallest wins (Gumbel's trick, without
the logarithm of the probability). Token i wins with its probability. The last bits of the logits, which do depend on
the batch, decide only where the first two arrive within those bits of each other. Inverting the cumulative function has
that risk at the border of every token, and the roundings of all earlier tokens add to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from treeline_runtime.messages import SamplingParams
from treeline_runtime.sampling.noise import negative_exponentials, row_keys

RANKED = 1024
"""Tokens that are put in order for top_p and min_p before the whole vocabulary is."""
BLOCK = 1 << 18
"""Elements of (rows x vocabulary) computed at once: what stays in a CPU's cache from one operation to the next."""


@dataclass(frozen=True, slots=True)
class Row:
    """How to sample one row of logits."""

    params: SamplingParams
    seed: int
    index: int
    """Which output token this is, from 0."""
    stop_ids: frozenset[int]
    prompt_len: int
    history: torch.Tensor | None
    """(prompt_len + index,) all tokens so far; needed for penalties only."""


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the row is an argmax of the model's logits."""
    return params.greedy and not adjusts(params)


def needs_history(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def adjusts(params: SamplingParams) -> bool:
    """Whether logits are changed before anything is chosen."""
    return needs_history(params) or bool(params.logit_bias) or params.min_new_tokens > 0


def sample(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """logits (rows, vocabulary) float32, may be overwritten → token ids (rows,) int64.

    Order: penalties, bias, minimum length; temperature; then top_k, top_p of what is left, min_p.
    """
    for i, row in enumerate(rows):
        if adjusts(row.params):
            _adjust(logits[i], row)
    chosen = logits.argmax(-1)
    free = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not free:
        return chosen
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    keys = row_keys([(row.seed, row.index) for row in rows], logits.device)
    plain = [i for i in free if not _filters(rows[i].params)]
    filtered = [i for i in free if _filters(rows[i].params)]
    block = max(1, BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    for first in range(0, len(plain), block):
        part = torch.tensor(plain[first : first + block], device=logits.device)
        probs = torch.softmax(logits[part].div_(temperatures[part, None]), dim=-1)
        chosen[part] = _race(probs, negative_exponentials(keys[part], logits.shape[1]))
    if filtered:
        part = torch.tensor(filtered, device=logits.device)
        probs = torch.softmax(logits[part].div_(temperatures[part, None]), dim=-1)
        chosen[part] = _draw_filtered(probs, keys[part], [rows[i].params for i in filtered])
    return chosen


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _adjust(logits: torch.Tensor, row: Row) -> None:
    """In place on (vocabulary,)."""
    params = row.params
    if row.history is not None:
        if params.repetition_penalty != 1.0:
            seen = row.history.unique()
            scores = logits[seen]
            factor = params.repetition_penalty
            logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
        if params.frequency_penalty or params.presence_penalty:
            tokens, counts = row.history[row.prompt_len :].unique(return_counts=True)
            logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if row.index < params.min_new_tokens and row.stop_ids:
        logits[torch.tensor(sorted(row.stop_ids), device=logits.device)] = float("-inf")


def _race(probs: torch.Tensor, negative_times: torch.Tensor) -> torch.Tensor:
    """probs (rows, n), not necessarily normalised → the winner of each row. What has no probability never wins."""
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
        if cut := [i for i in unlimited if last[i]]:  # their choice may go on beyond what was ranked
            ordered, ids, _ = _kept(probs[cut], [params[i] for i in cut], vocab)
            winners = _race(ordered, negative_exponentials(keys[cut], vocab, ids))
            tokens[torch.tensor(cut, device=device)] = ids.gather(1, winners[:, None]).squeeze(1)
    return tokens


def _kept(
    probs: torch.Tensor, params: list[SamplingParams], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` likeliest of each row → (probabilities, 0 where they may not be chosen; token ids; whether they may).

    Equal probabilities are ranked by token id, so that neither `width` nor other rows decide which of them are kept.
    """
    device = probs.device
    ordered, ids = _ranked(probs, width)
    vocab = probs.shape[1]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params], device=device)
    # sums of all probabilities may exceed 1 by rounding: without top_p nothing is compared with them
    shares = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
    top_p = torch.tensor(shares, dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in params], device=device)
    keep = torch.arange(width, device=device) < top_k[:, None]
    mass = torch.where(keep, ordered, 0.0).cumsum(-1, dtype=torch.float64)
    # of rows without top_k only the likeliest may be here, but their whole mass is known: it is 1
    total = torch.where(top_k < vocab, mass[:, -1], 1.0)
    keep &= mass - ordered < (top_p * total)[:, None]
    keep[:, 0] = True  # top_p = 0 still leaves the likeliest
    keep &= ordered >= (min_p * ordered[:, 0])[:, None]
    return torch.where(keep, ordered, 0.0), ids, keep


def _ranked(probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` likeliest of each row and their ids, the likeliest first, the lower id first among equals."""
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
