"""Pools whose `prefill` the API refuses, with the words that the user gets."""

from __future__ import annotations

_PAIR = "{model: {uri: hf://o/n}, accelerator: {type: nvidia}, "
REFUSED_PREFILL = [
    ("prefill: {}", "only engines vllm and sglang hand prompts over from pod to pod"),
    (
        "{model: {uri: hf://o/n}, engine: {type: custom, image: x}, prefill: {}}",
        "only engines vllm and sglang hand prompts over from pod to pod",
    ),
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
    (_PAIR + "engine: {type: vllm}, prefill: {replicas: 0}}", "greater than or equal to 1"),
]
