"""Log probabilities, of the model's own distribution: before penalties, bias and temperature."""

from __future__ import annotations

import torch

from treeline_runtime.messages import TokenLogprob

ROWS_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""


def chosen_and_top(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[list[TokenLogprob], list[list[TokenLogprob]]]:
    """logits (rows, vocabulary), tokens (rows,) → per row the pair of its token, and the `top` likeliest pairs."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
    chosen: list[TokenLogprob] = list(zip(values, tokens.tolist(), strict=True))
    best: list[list[TokenLogprob]] = [[] for _ in chosen]
    if top > 0:
        top_values, top_ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        best = [list(zip(v, i, strict=True)) for v, i in zip(top_values.tolist(), top_ids.tolist(), strict=True)]
    return chosen, best
