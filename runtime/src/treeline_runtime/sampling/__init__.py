"""Choosing tokens, and their log probabilities."""

from treeline_runtime.sampling.check import check_sampling
from treeline_runtime.sampling.sampler import Row, is_plain_greedy, needs_history, sample

__all__ = ["Row", "check_sampling", "is_plain_greedy", "needs_history", "sample"]
