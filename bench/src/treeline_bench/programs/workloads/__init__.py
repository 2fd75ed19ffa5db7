"""The eleven workloads of SGLang's paper (Zheng et al., 2024, section 6.1), by name."""

from treeline_bench.programs.workloads import (
    agents,
    hellaswag,
    json_decode,
    judge,
    mmlu,
    multi_turn,
    rag,
    react,
    skeleton_of_thought,
    tree_of_thought,
)
from treeline_bench.programs.workloads.base import Batch, Workload

__all__ = ["WORKLOADS", "Batch", "Workload"]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        mmlu.WORKLOAD,
        hellaswag.WORKLOAD,
        react.WORKLOAD,
        agents.WORKLOAD,
        tree_of_thought.WORKLOAD,
        skeleton_of_thought.WORKLOAD,
        judge.WORKLOAD,
        json_decode.WORKLOAD,
        multi_turn.SHORT_ANSWERS,
        multi_turn.LONG_ANSWERS,
        rag.WORKLOAD,
    )
}
