"""A step as plain data: everything that the executor gets, without requests.

All executors of a group compute the same step from the same bytes: the scheduler decides what depends on requests.
Sequences are numbered by their order in the step; sampled ones also among themselves.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from treeline_runtime.messages import MediaItem, SamplingParams

MICRO_BATCH_TOKENS = 256
"""The least tokens of a micro-batch, about: fewer take as long on a GPU, which reads all weights for them."""


class Writes(msgspec.Struct, array_like=True, frozen=True):
    """Values for a table, run after run in `values`: run i goes to rows[i], from starts[i] on."""

    rows: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    values: list[int] = []

    def cells(self, width: int) -> npt.NDArray[np.int64]:
        """The flat index of each value in a table of rows of this width."""
        lengths = np.array(self.lengths)
        before = lengths.cumsum() - lengths
        firsts = np.array(self.rows) * width + np.array(self.starts) - before
        return np.repeat(firsts, lengths) + np.arange(len(self.values))


class RowSampling(msgspec.Struct, array_like=True, frozen=True):
    """Sampling of a token that needs more than a temperature."""

    params: SamplingParams
    stop_ids: frozenset[int]
    prompt_len: int


class InputLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Asks for log probabilities of the tokens after positions `low` to `high`, with the `top` most likely at each."""

    sequence: int
    low: int
    high: int
    top: int


class ItemPart(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of an item: rows `begin` to `end` of its embeddings, from token `at` of the step on."""

    item: MediaItem
    begin: int
    end: int
    at: int


class MediaPlan(msgspec.Struct, array_like=True, frozen=True):
    """What the prompts of a step have of images and videos."""

    parts: list[ItemPart] = []
    positions: dict[int, bytes] = {}
    """For models with positions of their own: sequence → (3, tokens of the sequence) int64."""


class StepPlan(msgspec.Struct, omit_defaults=True, frozen=True, dict=True):
    """Sequence i, in row rows[i] of the tables, is computed from position starts[i] to ends[i]."""

    rows: list[int]
    starts: list[int]
    ends: list[int]
    decodes: bool = False
    """Only decoding, no prompts: the step may be a graph."""
    tokens: Writes = Writes()
    """Written to the token table before the step, as `pages` to the page table; not what was sampled there."""
    pages: Writes = Writes()
    drafts: dict[int, list[int]] = {}
    """Sequence → its last tokens, where these are guesses. Written to the token table, too. A token is sampled after
    each of them and before the first, so the sequence is in `sampling` once more than it has guesses, in a row."""
    chain: int = 0
    """Guesses that the drafter on the device makes for what follows the sampled tokens of each sequence."""
    right: dict[int, int] = {}
    """Sequence → how many of its guesses are taken for right, whatever is sampled; for measurements of speed."""
    sampling: list[int] = []
    """Sequences with a sampled token after their end; for these, in order:"""
    temperatures: list[float] = []
    """0: the most likely token; also 0 for those in `rows_sampling`, which are sampled afterwards."""
    seeds: list[int] = []
    indices: list[int] = []
    """The index of the sampled output token, from 0."""
    rows_sampling: dict[int, RowSampling] = {}
    """Number among sampled ones → further sampling parameters."""
    delayed: list[int] = []
    """Numbers of the sampled ones that `Executor.sample_delayed` samples."""
    logprobs: dict[int, int] = {}
    """Number among sampled ones → how many of the most likely tokens to report besides its own."""
    input_logprobs: list[InputLogprobs] = []
    hidden: list[int] = []
    adapters: list[int] = []
    """The slot of each sequence's adapter, -1: none. []: no sequence has one."""
    slots: dict[int, str] = {}
    """Slot → the digest of the adapter that is put there before the step."""
    deltas: dict[int, int] = {}
    """Row → what is added to the positions of its tokens for their angles, from this step on."""
    media: MediaPlan | None = None
    """None: no prompt in it has items."""
    whole: list[bool] = []
    """For vector models, by sequence: whether the step computes its last token."""

    @cached_property
    def q_lens(self) -> list[int]:
        """Tokens computed per sequence."""
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def bounds(self) -> list[int]:
        """The index of each sequence's first token among all tokens of the step, and at the end their number."""
        return [0, *accumulate(self.q_lens)]

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    def cells(self) -> npt.NDArray[np.int32]:
        """(2, tokens): the row and the position of each token."""
        positions = [np.arange(start, end) for start, end in zip(self.starts, self.ends, strict=True)]
        return np.stack((np.repeat(self.rows, self.q_lens), np.concatenate(positions))).astype(np.int32)

    def micro_batches(self, stages: int) -> list[tuple[int, int]]:
        """Cuts the step between sequences into parts of about as many tokens, at most one for each stage of a pipeline.
        Returns each one's first sequence and the one after its last."""
        count = min(stages, self.num_tokens // MICRO_BATCH_TOKENS)
        if count <= 1:
            return [(0, len(self.rows))]
        bounds = np.array(self.bounds)
        cuts = (int(np.abs(bounds - self.num_tokens * i / count).argmin()) for i in range(count + 1))
        return list(pairwise(sorted(set(cuts))))

    @property
    def sampled_at(self) -> list[int]:
        """The position of each sampled token."""
        return self._guessed_at if self.drafts else [self.ends[i] for i in self.sampling]

    @cached_property
    def _guessed_at(self) -> list[int]:
        found, last, at = list[int](), -1, 0
        for i in self.sampling:
            at = at + 1 if i == last else self.ends[i] - len(self.drafts.get(i, ()))
            last = i
            found.append(at)
        return found

    @property
    def lasts(self) -> list[int]:
        """The index among all tokens of the step of the one before each sampled token."""
        at = zip(self.sampling, self.sampled_at, strict=True)
        return [self.bounds[i] + position - self.starts[i] - 1 for i, position in at]

    def targets(self, scratch_row: int) -> list[int]:
        """The row for each sampled token; where a guess follows instead, the scratch row."""
        at = zip(self.sampling, self.sampled_at, strict=True)
        return [self.rows[i] if position == self.ends[i] else scratch_row for i, position in at]

    @property
    def guesses(self) -> Writes:
        """`drafts`, for the token table."""
        drafts = self.drafts.items()
        return Writes(
            [self.rows[i] for i, _ in drafts],
            [self.ends[i] - len(draft) for i, draft in drafts],
            [len(draft) for _, draft in drafts],
            [token for _, draft in drafts for token in draft],
        )
