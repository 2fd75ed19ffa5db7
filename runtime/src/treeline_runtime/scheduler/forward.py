"""One step on the device, from table cells to next tokens; eager or under capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.attention import AttentionBackend, HostPages
from treeline_runtime.context import Attends, Context
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.lora import AdapterStep
from treeline_runtime.ops import Tables
from treeline_runtime.sampling.noise import row_keys
from treeline_runtime.scheduler.chains import Chains
from treeline_runtime.scheduler.embeddings import StepMedia
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.transfer import upload


class Tokens(NamedTuple):
    """Chosen ids (rows,) int64, and whether a row's logits are finite (rows,) bool."""

    ids: torch.Tensor
    finite: torch.Tensor


PACKED = 6
"""Numbers per token in `DecodeInputs.packed`."""


class OnDevice(NamedTuple):
    """Each token's row and position, the row for the following token, its temperature (0 = greedy) and random key."""

    rows: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor) -> OnDevice:
        """Views of `DecodeInputs.packed`."""
        n = len(packed) // PACKED
        rows, positions, targets, temperatures, keys = packed.split((n, n, n, n, 2 * n))
        return cls(rows, positions, targets, temperatures.view(torch.float32), keys.view(n, 2))


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Uploaded in one copy, for tokens after which one is sampled; if the next is known or guessed, `targets` is the
    scratch row."""

    rows: list[int]
    positions: list[int]
    targets: list[int]
    temperatures: list[float]
    keys: npt.NDArray[np.int32]

    @classmethod
    def of(cls, plan: StepPlan, scratch_row: int) -> DecodeInputs:
        """The tokens before sampled ones."""
        rows = [plan.rows[i] for i in plan.sampling]
        if any(plan.temperatures):
            keys = row_keys(plan.seeds, plan.indices)
        else:  # no row draws
            keys = np.zeros((len(rows), 2), dtype=np.int32)
        positions = [at - 1 for at in plan.sampled_at]
        targets = plan.targets(scratch_row) if plan.drafts else rows
        return cls(rows, positions, targets, plan.temperatures, keys)

    @classmethod
    def spread(cls, plan: StepPlan, scratch_row: int) -> DecodeInputs:
        """Makes the inputs of a step in which some sequences have several tokens: a row per token. Only after a sampled
        sequence's last token a token is kept."""
        those, lasts = cls.of(plan, scratch_row), plan.lasts
        rows, positions = plan.cells().tolist()
        targets, temperatures = [scratch_row] * len(rows), [0.0] * len(rows)
        keys = np.zeros((len(rows), 2), dtype=np.int32)
        keys[lasts] = those.keys
        for at, row, temperature in zip(lasts, those.targets, those.temperatures, strict=True):
            targets[at], temperatures[at] = row, temperature
        return cls(rows, positions, targets, temperatures, keys)

    def packed(self, size: int, row: int) -> npt.NDArray[np.int32]:
        """(PACKED x size,), padded with greedy one-token sequences in `row`."""
        n = len(self.rows)
        out = np.zeros(PACKED * size, dtype=np.int32)
        out[:n] = self.rows
        out[n:size] = row
        out[size : size + n] = self.positions
        out[2 * size : 2 * size + n] = self.targets
        out[2 * size + n : 3 * size] = row
        out[3 * size : 3 * size + n] = np.array(self.temperatures, dtype=np.float32).view(np.int32)
        out[4 * size : 4 * size + 2 * n] = self.keys.reshape(-1)
        return out

    def on(self, device: torch.device) -> OnDevice:
        return OnDevice.of(upload(self.packed(len(self.rows), 0), device))


class DeviceTables:
    """`token_pool[row, position]` relays tokens between steps: a launch reads its input there and writes what it
    samples, so the next launch need not wait for it. `page_table[row, i]` is the page of tokens i x page_size …

    All other inputs come with the plan. The row after the last belongs to no request: padding uses it, and its pages
    are all `scratch_page`.
    """

    def __init__(
        self,
        num_rows: int,
        context_length: int,
        page_size: int,
        device: torch.device,
        *,
        scratch_page: int = 0,
        has_deltas: bool = False,
    ) -> None:
        """has_deltas: angles of some rows are those of other positions."""
        self.scratch_row = num_rows
        # numpy zeros use memory only once written
        self._pages = np.zeros((num_rows + 1, -(-context_length // page_size)), dtype=np.int64)
        self._pages[num_rows] = scratch_page
        self._version = 0
        self._mirrored = device.type != "cpu"
        self.page_table = torch.from_numpy(self._pages).to(device)
        self._deltas = np.zeros(num_rows + 1, dtype=np.int64)
        self.deltas = torch.from_numpy(self._deltas).to(device) if has_deltas else None
        self.token_pool = torch.from_numpy(np.zeros((num_rows + 1, context_length + 1), dtype=np.int64)).to(device)

    def on_host(self, rows: list[int]) -> HostPages:
        return HostPages(self._pages, rows, self._version)

    def positions(self, plan: StepPlan) -> torch.Tensor | None:
        """`StepMedia.positions` of a step, which was written."""
        if self.deltas is None or plan.media is None:
            return None
        rows, positions = plan.cells().astype(np.int64)
        found = np.tile(positions + self._deltas[rows], (3, 1))
        for i, known in plan.media.positions.items():
            found[:, plan.bounds[i] : plan.bounds[i + 1]] = np.frombuffer(known, dtype=np.int64).reshape(3, -1)
        return upload(found, self.token_pool.device)

    def write(self, plan: StepPlan) -> None:
        """Writes a plan's news, in one copy and one kernel per table."""
        if plan.deltas and self.deltas is not None:
            where, values = np.array([*plan.deltas]), np.array([*plan.deltas.values()])
            self._deltas[where] = values
            if self._mirrored:
                _scatter(self.deltas, where, values)
        for writes in (plan.tokens, plan.guesses) if plan.drafts else (plan.tokens,):
            if writes.values:
                where = writes.cells(self.token_pool.shape[1])
                _scatter(self.token_pool, where, np.array(writes.values))
        if plan.pages.values:
            if 0 in plan.pages.starts:  # rows begin with other pages
                self._version += 1
            where, flat = plan.pages.cells(self._pages.shape[1]), self._pages.reshape(-1)
            flat[where] = plan.pages.values
            if self._mirrored:
                # as they are now: a page that is written twice gets the same number twice
                _scatter(self.page_table, where, flat[where])


def _scatter(table: torch.Tensor, where: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
    both = upload(np.stack((where, values)), table.device)
    table.view(-1).index_copy_(0, both[0], both[1])


class Forward:
    """Model, attention and tables together."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, table: DeviceTables, chains: Chains | None = None
    ) -> None:
        self._model = model
        self._chains = chains
        self._attention = attention
        self._table = table

    def hidden(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        attention: Attends | None = None,
        adapters: AdapterStep | None = None,
        media: StepMedia | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rows, positions (tokens,) int32: the input's cells → hidden states, whether keys and values are finite.

        attention: used instead of the backend."""
        cos, sin = self._model.rope
        page_size = self._attention.pool.page_size
        tables = Tables(self._table.token_pool, self._table.page_table, page_size, cos, sin, self._table.deltas)
        found = self._model.ops.look_up(rows, positions, tables)
        attention = self._attention if attention is None else attention
        context = Context(attention, plan, found.slots, found.cos, found.sin, found.unfinite, adapters)
        x = self._model.embed(found.ids)
        if media is not None:
            context.deep = media.put(x)
            if media.positions is not None and self._model.mrope is not None:
                context.cos, context.sin = self._model.mrope.tables(media.positions)
        ranks = self._model.ranks
        hidden, finite = self._model.forward(x, context), self._model.ops.stored_finite(context)
        if self._chains is not None and self._model.watched:
            self._chains.extend(rows, positions, context.entering)
        if ranks is not None:  # each of a stage has other heads
            finite = ranks.sum(finite.float()) == ranks.rank.count
        return hidden, finite

    def empty_logits(self, rows: int) -> torch.Tensor:
        """(rows, vocabulary), for `out`."""
        pool = self._attention.pool
        return torch.empty(rows, self._model.config.vocab_size, dtype=pool.dtype, device=pool.keys[0].device)

    def choose(
        self, hidden: torch.Tensor, inputs: OnDevice, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tokens]:
        """hidden (rows, hidden) → logits (rows, vocabulary), in `out` if given; and tokens, put into the table."""
        logits = self._model.logits(hidden, out)
        ranks = self._model.ranks
        if ranks is None or ranks.rank.number == 0:
            tokens = Tokens(*self._model.ops.choose(logits, inputs.temperatures, inputs.keys))
        else:
            ids = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
            tokens = Tokens(ids, torch.empty_like(ids, dtype=torch.bool))
        if ranks is not None:
            tokens = Tokens(ranks.first(tokens.ids), tokens.finite)
        self._model.ops.put(tokens.ids, self._table.token_pool[:, 1:], inputs.targets, inputs.positions)
        return logits, tokens

    def decode(
        self, inputs: OnDevice, plan: Any, out: torch.Tensor | None = None, adapters: AdapterStep | None = None
    ) -> tuple[torch.Tensor, Tokens, torch.Tensor]:
        """A step with one new token per sequence → logits, tokens, whether keys and values are finite."""
        hidden, kv_finite = self.hidden(inputs.rows, inputs.positions, plan, adapters=adapters)
        return *self.choose(hidden, inputs, out), kv_finite
