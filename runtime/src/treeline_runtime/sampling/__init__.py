"""Choosing tokens, and their log probabilities."""

from treeline_runtime.sampling.check import check_sampling
from treeline_runtime.sampling.sampler import Row, needs_history, needs_more, sample

__all__ = ["Row", "check_sampling", "needs_history", "needs_more", "sample"]
