"""The adapters by engine type, as pools name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from treeline_operator.api.engine import EngineType
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files
from treeline_operator.plan.engines.base import EngineAdapter, Launch, tells_hits
from treeline_operator.plan.engines.custom import Custom
from treeline_operator.plan.engines.sglang import SGLang
from treeline_operator.plan.engines.treeline import Treeline
from treeline_operator.plan.engines.vllm import Vllm
from treeline_operator.world import Images

ADAPTERS: Final[Mapping[EngineType, EngineAdapter]] = {
    adapter.name: adapter for adapter in (Treeline(), SGLang(), Vllm(), Custom())
}


def adapter_of(pool: InferencePool) -> EngineAdapter:
    """The adapter of the pool's engine."""
    return ADAPTERS[pool.spec.engine.type]


def launch(pool: InferencePool, files: Files, images: Images) -> Launch:
    """How the pool's engine is started. `images` are used where the pool names none."""
    return adapter_of(pool).launch(pool, files, images)


def hides_hits(pool: InferencePool) -> bool:
    """Whether the pods are told by their command line to keep to themselves how much of a prompt was cached."""
    return adapter_of(pool).hits_by_flag and not tells_hits(pool)
