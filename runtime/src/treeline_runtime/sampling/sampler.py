"""From logits to tokens.

A sampled token is a function of its row alone: the logits, the parameters, the request's seed, the token's index.
Whatever else is in the batch, and however often a request is retracted, it draws the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeline_runtime.messages import SamplingParams

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a seed and a counter (splitmix64), with 40 bits."""
    x = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((x ^ (x >> 31)) >> 24) / (1 << 40)


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
    temperatures = torch.tensor([rows[i].params.temperature for i in free], device=logits.device)
    probs = torch.softmax(logits[free] / temperatures[:, None], dim=-1)
    draws = torch.tensor([uniform(rows[i].seed, rows[i].index) for i in free], dtype=torch.float64)
    plain = [j for j, i in enumerate(free) if not _filters(rows[i].params)]
    filtered = [j for j, i in enumerate(free) if _filters(rows[i].params)]
    where = torch.tensor(free, device=logits.device)
    draws = draws.to(logits.device)
    if plain:
        chosen[where[plain]] = _draw(probs[plain], draws[plain])
    if filtered:
        chosen[where[filtered]] = _draw_filtered(
            probs[filtered], draws[filtered], [rows[free[j]].params for j in filtered]
        )
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


def _draw(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Invert the distribution function. probs (rows, n) need not sum to one."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    targets = draws[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return index.clamp_(max=probs.shape[1] - 1)


def _draw_filtered(probs: torch.Tensor, draws: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    device = probs.device
    vocab = probs.shape[1]
    ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], device=device)
    min_p = torch.tensor([p.min_p for p in params], device=device)
    ordered = torch.where(torch.arange(vocab, device=device) < top_k[:, None], ordered, 0.0)
    before = ordered.cumsum(-1) - ordered
    keep = before < (top_p * ordered.sum(-1))[:, None]
    keep[:, 0] = True  # top_p = 0 still leaves the likeliest
    keep &= ordered >= (min_p * ordered[:, 0])[:, None]
    index = _draw(torch.where(keep, ordered, 0.0), draws)
    return ids.gather(1, index[:, None]).squeeze(1)
