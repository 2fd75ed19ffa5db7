"""Guesses of a drafter on the device: a chain of tokens after each sampled one.

The drafter's keys and values, and the features of each token, are in pages of the same numbers as the model's, in the
same slots, and move with these. What is in a slot depends on the tokens up to its own and on nothing later, so a cached
prefix has all that the drafter needs. It is written as soon as the model has computed the token; slots of wrong guesses
are overwritten, as the model's are. A chain itself is in a small pool of its own, for one step.

Nothing here waits for the device: how many guesses were right, and so where a chain begins, is known there alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from treeline_runtime.attention import Layout
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.context import Context
from treeline_runtime.kvcache import KVPool
from treeline_runtime.kvcache.pool import zeros
from treeline_runtime.memory import CHAIN_BYTES
from treeline_runtime.models.draft_model import DraftModel
from treeline_runtime.models.eagle import EagleHead
from treeline_runtime.ops import Found, Ops, Tables
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.resolve import Resolved
from treeline_runtime.transfer import Readback, upload

if TYPE_CHECKING:
    from treeline_runtime.scheduler.forward import DeviceTables

MOST_BYTES = CHAIN_BYTES // 3
"""Keys and values that chains copy from pages at once, and each half again with the chain's own; of more, nothing
is guessed for the longest sequences."""


@dataclass(slots=True, eq=False)
class _Chain:
    """Attention of one new token per row, over what is before the chain and the chain up to it."""

    pool: KVPool
    """Row i's chain is in page i."""
    before: KVPool
    pages: torch.Tensor
    """(rows x pages,): of `before`."""
    seen: torch.Tensor
    """(rows, tokens in these pages) bool: those before the chain; a head has nothing at position 0."""

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`AttentionBackend.forward`. plan: the place of the new token in the chain, from 0."""
        rows, heads, dim = k.shape
        own = torch.arange(rows, device=q.device)
        found: list[torch.Tensor] = []
        for before, chain in zip(self.before.gather(layer, self.pages), self.pool.gather(layer, own), strict=True):
            taken = before.view(rows, -1, heads, dim).masked_fill_(~self.seen[..., None, None], 0)
            found.append(torch.cat((taken, chain[:, : plan + 1]), 1).transpose(1, 2))
        mask = F.pad(self.seen, (0, plan + 1), value=True)[:, None, None]
        keys, values = found
        # the queries of a key's head are the rows of a small matrix
        out = F.scaled_dot_product_attention(q.view(rows, heads, -1, dim), keys, values, attn_mask=mask)
        return out.reshape(rows, -1)


class Chains:
    """Owns the drafter's memory."""

    def __init__(
        self, drafter: EagleHead | DraftModel, ops: Ops, table: DeviceTables, model: KVPool, limits: Resolved, most: int
    ) -> None:
        """model: the pool whose pages its own move with. most: guesses in a chain."""
        layer = drafter.layer
        self._drafter, self._ops, self._device = drafter, ops, limits.device
        self._tables = Tables(table.token_pool, table.page_table, limits.page_size, *drafter.rope)
        self._last = drafter.rope[0].shape[1] - 1

        def pool(count: int, size: int) -> KVPool:
            return KVPool(
                num_layers=layer.num_layers,
                num_pages=count,
                page_size=size,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=limits.dtype,
                device=limits.device,
            )

        self.pool, self._chain = pool(limits.num_pages, limits.page_size), pool(limits.max_running_requests, most)
        self._page_bytes = self.pool.keys[0][0].nbytes + self.pool.values[0][0].nbytes
        self._attention = TorchSDPA(self.pool, layer.num_heads)
        along = [self.pool.numbers]
        if drafter.joins:
            shape = 1, limits.num_pages + 1, limits.page_size * layer.hidden_size
            along.append(zeros(shape, limits.dtype, limits.device))
            self._features = along[1].view(-1, layer.hidden_size)
        model.take_along(*along)

    def extend(self, rows: torch.Tensor, positions: torch.Tensor, entering: Sequence[torch.Tensor]) -> None:
        """Keeps tokens that the model has computed, for a head: their cells (tokens,), and what entered the watched
        layers. May be captured."""
        assert isinstance(self._drafter, EagleHead)
        found = self._look_up(rows, positions)
        before = self._look_up(rows, (positions - 1).clamp_(min=0)).slots
        self._features.index_copy_(0, found.slots, self._drafter.join(entering))
        context = Context(self._attention, None, found.slots, found.cos, found.sin, found.unfinite)
        self._drafter.keep(found.ids, self._features[before], context)

    def follow(self, plan: StepPlan) -> None:
        """Keeps the tokens of a step, with a draft model."""
        if not isinstance(self._drafter, DraftModel):
            return
        cells, rows = upload(plan.cells(), self._device), upload(np.array(plan.rows), self._device)
        found = self._look_up(cells[0], cells[1])
        attended = self._attention.plan(Layout(plan.q_lens, plan.ends, self._tables.pages, rows))
        context = Context(self._attention, attended, found.slots, found.cos, found.sin, found.unfinite)
        self._drafter.keep(found.ids, context)

    def guess(self, plan: StepPlan, ids: torch.Tensor) -> tuple[list[int], Readback] | None:
        """ids (sampled,): the tokens of a step → sequences that sample; for each, (sequences, 1 + plan.chain), how
        many of its guesses were right, and guesses for what follows. Where their keys and values are too many, the
        longest ones are left out, so nobody's long text takes the guesses of others. None: all are."""
        firsts = {i: at for at, i in reversed(list(enumerate(plan.sampling)))}
        sequences, pages = sorted(firsts, key=plan.ends.__getitem__), 0
        while sequences:
            pages = -(-plan.ends[sequences[-1]] // self._tables.page_size)
            if len(sequences) * pages * self._page_bytes <= MOST_BYTES:
                break
            sequences.pop()
        else:
            return None
        drafts = [plan.drafts.get(i, []) for i in sequences]
        width = max(map(len, drafts))
        known = np.full((len(sequences), 3 + width), -1)
        for n, (i, draft) in enumerate(zip(sequences, drafts, strict=True)):
            known[n, : 3 + len(draft)] = plan.rows[i], plan.ends[i] - len(draft), firsts[i], *draft
        there = upload(known, ids.device)
        at = there[:, 2, None] + torch.arange(width + 1, device=ids.device)
        sampled = ids[at.clamp_(max=len(ids) - 1)]
        right = (sampled[:, :width] == there[:, 3:]).cumprod(1).sum(1)
        token = sampled.gather(1, right[:, None])[:, 0]
        positions, rows = (there[:, 1] + right).int(), there[:, 0].int()
        hidden = self._features[self._look_up(rows, positions - 1).slots] if self._drafter.joins else token
        before = torch.arange(pages * self._tables.page_size, device=ids.device)
        seen = (before >= self._drafter.joins) & (before < positions[:, None])
        of_rows = self._tables.pages[:, :pages].index_select(0, rows).flatten()
        chain = _Chain(self._chain, self.pool, of_rows, seen)
        slots = torch.arange(len(sequences), device=ids.device) * self._chain.page_size
        guesses = [right]
        for place in range(plan.chain):
            found = self._look_up(rows, (positions + place).clamp_(max=self._last))
            context = Context(chain, place, slots + place, found.cos, found.sin, found.unfinite)
            token, hidden = self._drafter.guess(token, hidden, context)
            guesses.append(token)
        return sequences, Readback(torch.stack(guesses, 1))

    def _look_up(self, rows: torch.Tensor, positions: torch.Tensor) -> Found:
        return self._ops.look_up(rows, positions, self._tables)
