"""What the delayed rows of a step may choose: rows with a constraint or a processor, sampled after the steps before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from treeline_runtime.core import Batch
from treeline_runtime.sampling import Constraint
from treeline_runtime.scheduler.executor import Choices


def choices_of(
    batch: Batch, fill_masks: Callable[[Sequence[Constraint]], tuple[torch.Tensor, dict[int, str]]]
) -> Choices:
    """By what each request of the batch has sampled by now. Requests that have ended choose nothing."""
    live = [(j, req) for j, i in enumerate(batch.sampling) if (req := batch.reqs[i]).finish is None]
    processors = {
        j: (req.processor.name, partial(req.processor.apply, req.tokens[req.prompt_len + req.processor.seen :]))
        for j, req in live
        if req.processor is not None
    }
    # where a request has jumped, what it samples here is not used
    bound = [(j, req.constraint) for j, req in live if req.constraint is not None and req.overtaken < 0]
    if not bound:
        return Choices([], None, {}, processors)
    masks, failed = fill_masks([constraint for _, constraint in bound])
    masked = [j for j, _ in bound]
    return Choices(masked, masks, {masked[i]: why for i, why in failed.items()}, processors)
