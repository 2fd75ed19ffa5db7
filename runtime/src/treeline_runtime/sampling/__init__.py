"""Sampling and log probabilities."""

from treeline_runtime.sampling.constraint import MAX_DRAFT, Constraint, Masks, mask_words
from treeline_runtime.sampling.processor import Factory, LogitProcessor, Processing
from treeline_runtime.sampling.sampler import Row, check_sampling, needs_history, needs_more, sample

__all__ = [
    "MAX_DRAFT",
    "Constraint",
    "Factory",
    "LogitProcessor",
    "Masks",
    "Processing",
    "Row",
    "check_sampling",
    "mask_words",
    "needs_history",
    "needs_more",
    "sample",
]
