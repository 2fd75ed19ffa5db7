"""Log probabilities, of the model's own distribution: before penalties, bias and temperature."""

from __future__ import annotations

import torch

from treeline_runtime.messages import TokenLogprob
from treeline_runtime.transfer import Readback

ROWS_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""


class Logprobs:
    """Of some rows: of a token each, and of the `top` likeliest; on their way from the device until asked for."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> None:
        """logits (rows, vocabulary) float32, tokens (rows,)"""
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        values = logprobs.gather(1, tokens[:, None]).squeeze(1)
        self._copies = Readback(values, tokens, best.values, best.indices)

    def get(self) -> tuple[list[TokenLogprob], list[list[TokenLogprob]]]:
        """→ per row the pair of its token, and the `top` likeliest pairs."""
        values, tokens, top_values, top_ids = (copy.tolist() for copy in self._copies.get())
        best = [list(zip(v, i, strict=True)) for v, i in zip(top_values, top_ids, strict=True)]
        return list(zip(values, tokens, strict=True)), best
