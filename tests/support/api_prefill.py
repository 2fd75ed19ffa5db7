"""Pools whose `prefill` the API refuses, with the words that the user gets."""

from __future__ import annotations

_PAIR = "{model: {uri: hf://o/n}, accelerator: {type: nvidia}, "
REFUSED_PREFILL = [
    ("prefill: {}", "set engine.hostCache, such as 16Gi"),
    (
        "{model: {uri: hf://o/n}, engine: {type: custom, image: x}, prefill: {}}",
        "it is unknown how engine custom hands prompts over",
    ),
    (
        "{engine: {hostCache: 1Gi, tensorParallel: 2}, accelerator: {nodes: 2}}",
        "a model split over several pods has no host cache",
    ),
    (
        "{engine: {hostCache: 1Gi}, accelerator: {type: nvidia}, prefill: {accelerator: {type: nvidia, count: 2}}}",
        "both sides split the model over as many devices",
    ),
    ("engine: {hostCache: 1Gi, dataParallel: 2, port: 5858}", "are for pages of hostCache"),
    (_PAIR + "engine: {type: vllm, hostCache: 1Gi}}", "hostCache is a setting of treeline"),
    (
        _PAIR + "engine: {type: vllm}, prefill: {accelerator: {type: nvidia, nodes: 2}}}",
        "a prefill replica is one pod",
    ),
    (_PAIR + "engine: {type: vllm}, prefill: {accelerator: {}}}", "both sides have the engine's image"),
    (
        _PAIR + "engine: {type: vllm, args: ['--kv-transfer-config={}']}, prefill: {}}",
        "the operator sets --kv-transfer-config of pods with prefill",
    ),
    (
        _PAIR + "engine: {type: vllm, args: [--kv_transfer_config.kv_role=kv_both]}, prefill: {}}",
        "the operator sets --kv-transfer-config of pods with prefill",
    ),
    (
        _PAIR + "engine: {type: sglang, args: [--disaggregation-mode, prefill]}, prefill: {}}",
        "the operator sets --disaggregation-mode and --disaggregation-bootstrap-port of pods with prefill",
    ),
    (
        "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 2}, engine: {type: vllm, tensorParallel: 2},"
        " prefill: {accelerator: {type: nvidia, count: 1}}}",
        "set prefill.accelerator.count to a multiple of tensorParallel times dataParallel",
    ),
    *(
        (_PAIR + f"engine: {{type: sglang, port: {port}}}, prefill: {{}}}}", "are for prompts that are handed over")
        for port in (5600, 8998)
    ),
    (
        _PAIR + "engine: {type: vllm}, prefill: {template: {metadata: {labels: {treeline.dev/role: both}}}}}",
        "labels of treeline.dev on pods are reserved",
    ),
    (_PAIR + "engine: {type: vllm}, prefill: {maxReplicas: 2}}", "set autoscaling.type to Picker"),
    (
        _PAIR + "engine: {type: vllm}, autoscaling: {type: Picker, maxReplicas: 9}, prefill: {minReplicas: 3}}",
        "minReplicas needs a maxReplicas that is not less",
    ),
    (_PAIR + "engine: {type: vllm}, prefill: {replicas: 0}}", "greater than or equal to 1"),
]
