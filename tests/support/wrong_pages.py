"""A logit processor that spoils the KV cache of the process in which it runs."""

from __future__ import annotations

import gc
from typing import Any

import torch
from treeline_runtime.kvcache import KVPool


class Spoil:
    """Replaces all keys and values by noise, and leaves the logits as they are."""

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        pass

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> None:
        gc.unfreeze()  # what is frozen is not listed
        for pool in (one for one in gc.get_objects() if isinstance(one, KVPool)):
            pool._all.normal_(generator=torch.Generator().manual_seed(0))
