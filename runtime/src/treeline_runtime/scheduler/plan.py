"""What a step computes, as plain data: all that the executor gets to know of it, and nothing of requests.

Every executor of a group computes the same step from the same bytes: what depends on a request is decided by the
scheduler, which makes the plan. Sequences are numbered in their order in the step; those that sample
have numbers of their own besides.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt

from treeline_runtime.messages import SamplingParams


class Writes(msgspec.Struct, array_like=True, frozen=True):
    """Runs of values for a table, one after another in `values`: run i is written to rows[i], from starts[i] on."""

    rows: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    values: list[int] = []

    def cells(self, width: int) -> npt.NDArray[np.int64]:
        """Where each of the values goes in a table of rows so wide, laid out flat."""
        lengths = np.array(self.lengths)
        before = lengths.cumsum() - lengths
        firsts = np.array(self.rows) * width + np.array(self.starts) - before
        return np.repeat(firsts, lengths) + np.arange(len(self.values))


class RowSampling(msgspec.Struct, array_like=True, frozen=True):
    """How a token is chosen that takes more than a temperature."""

    params: SamplingParams
    stop_ids: frozenset[int]
    prompt_len: int


class InputLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of the tokens that follow a sequence's positions from `low` up to `high`, with the `top` likeliest at each."""

    sequence: int
    low: int
    high: int
    top: int


class Embeddings(msgspec.Struct, array_like=True, frozen=True):
    """What stands for tokens of the step from the `first` on, counted over all its sequences."""

    first: int
    data: bytes
    """(tokens, hidden) little-endian float32, as `Decoder.embed` makes them of token ids."""


class StepPlan(msgspec.Struct, omit_defaults=True, frozen=True):
    """Sequence i, in row rows[i] of the tables, is computed from position starts[i] up to ends[i]."""

    rows: list[int]
    starts: list[int]
    ends: list[int]
    decodes: bool = False
    """Outputs go on, and no prompt is computed: the step may be a graph."""
    tokens: Writes = Writes()
    """Written to the table of tokens before the step, as `pages` to that of pages. What is read of them is what these
    and the steps before have written: a sampled token is in the table already."""
    pages: Writes = Writes()
    embeddings: list[Embeddings] = []
    sampling: list[int] = []
    """Sequences after whose end a token is sampled; of these, in order:"""
    temperatures: list[float] = []
    """0: the likeliest token, and of those in `rows_sampling` too, which are sampled afterwards."""
    seeds: list[int] = []
    indices: list[int] = []
    """Which token of its output is sampled, from 0."""
    rows_sampling: dict[int, RowSampling] = {}
    """Number among those who sample → what else its choice goes by."""
    delayed: list[int] = []
    """Of these, those that `Executor.sample_delayed` samples."""
    logprobs: dict[int, int] = {}
    """Number among those who sample → how many of the likeliest tokens come with the log probability of its own."""
    input_logprobs: list[InputLogprobs] = []
    hidden: list[int] = []
    """Sequences whose hidden states are returned."""
    whole: list[bool] = []
    """Of a model that makes vectors, by sequence: whether the step has its last token."""

    @property
    def q_lens(self) -> list[int]:
        """Tokens computed for each sequence."""
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]

    @property
    def num_tokens(self) -> int:
        return sum(self.ends) - sum(self.starts)

    @property
    def lasts(self) -> list[int]:
        """Of those who sample, the last token's number among all tokens of the step."""
        ends = list(accumulate(self.q_lens))
        return [ends[i] - 1 for i in self.sampling]
