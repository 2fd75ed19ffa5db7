"""The interface between models and attention kernels.

A step is a ragged batch: the new tokens of all sequences, one after another. Earlier tokens are in the KV pool, found
through the page table. A backend gets the step's `Layout` once (`plan`), then one call per layer (`forward`), after the
new keys and values were stored. With `kv_len` tokens after the step, `q_len` of them new, token i of a sequence sees
the first kv_len - q_len + i + 1, or in a layer with a window the last of these. In a span it also sees what follows it
there.

`Scoring` says how scores are computed, for all steps, and each layer's window. A window limits what is read, not what
is kept: the pool holds all tokens of all layers, since prefixes are shared by pages of all layers.

Tokens that are not seen must not matter: slots past a sequence's end and pages behind padding hold old data, perhaps
NaN. A mask alone is not enough, since 0 x NaN is NaN: hidden values are zeroed or not read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.kvcache.pool import KVPool
from treeline_runtime.models.model_config import PLAIN, Scoring


@dataclass(frozen=True, slots=True)
class HostPages:
    """The host's copy of a step's page table, used to find shared prefixes."""

    pages: npt.NDArray[np.int64]
    """The page table as on the device at the time of the step."""
    rows: list[int]
    """The rows of the step's sequences, without the padding ones at the end."""
    version: int
    """Unchanged while tokens that rows already had stay in the same pages."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The lengths and pages of one step's sequences; tensors are on the device."""

    q_lens: list[int]
    """New tokens of each sequence, at least 1."""
    kv_lens: list[int]
    """Tokens of each sequence after the step; kv_lens[i] >= q_lens[i]."""
    page_table: torch.Tensor
    """(rows, >= pages of the longest) int64: pages in order; entries past a sequence's end are any valid page."""
    rows: torch.Tensor
    """(sequences,) int64: each sequence's row of the page table."""
    host: HostPages | None = None
    """None if shared prefixes are unknown."""
    spans: Sequence[tuple[int, int]] = ()
    """New tokens that see each other in both directions: the first one in the step, and the one after the last."""


class AttentionBackend(ABC):
    """Attention over a paged pool. An instance serves one pool; a plan is valid until the next `plan`."""

    sharers = 1
    """Sequences with the same keys, in steps of one new token each, for which these are read once."""

    def __init__(self, pool: KVPool, num_heads: int, scoring: Scoring = PLAIN) -> None:
        assert len(scoring.windows) in (0, len(pool.keys))
        self.pool = pool
        self.num_heads = num_heads
        self.num_kv_heads, self.head_dim = pool.keys[0].shape[-2:]
        assert num_heads % self.num_kv_heads == 0
        self.scoring = scoring
        self.scale = self.head_dim**-0.5 if scoring.scale is None else scoring.scale

    def capture_buffers(self, sequences: int) -> Any | None:
        """Device memory for plans of steps with this many sequences of one new token each, so that captured kernels
        find each step's plan at the same place. None: this backend's steps cannot be captured."""
        return None

    @abstractmethod
    def plan(self, layout: Layout, buffers: Any | None = None) -> Any:
        """Prepares a step; the result is passed to `forward` for every layer.

        `buffers`: from `capture_buffers`, for a step that replays a graph: the plan is written there. The call never
        waits for the device.
        """

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q (tokens, heads, head_dim) → (tokens, heads x head_dim), in `out` if given.

        k, v (tokens, kv_heads, head_dim): what the step has stored, for kernels that need not look it up.
        sinks (heads,) float32: where `Scoring.sinks`, and only there.
        """


_LOG2_E = 1.4426950408889634


def processors_of(device: torch.device) -> tuple[int, int]:
    """Returns the number of processors, and the bytes of shared memory that a program may use. On a CPU, where kernels
    are interpreted: one processor with room for any block."""
    if device.type != "cuda":
        return 1, 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def factors(backend: AttentionBackend, layer: int) -> tuple[float, float, float]:
    """Returns the factor for products of queries and keys, so that their softmax (or a cap's sigmoid) is in base 2; the
    factor for values; the cap in base 2, or 0."""
    pool, cap = backend.pool, backend.scoring.softcap
    scale = backend.scale * _LOG2_E if cap is None else 2 * backend.scale / cap
    return pool.key_scales[layer] * scale, pool.value_scales[layer], 0.0 if cap is None else cap * _LOG2_E
