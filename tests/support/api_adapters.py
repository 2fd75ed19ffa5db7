"""Pools and InferenceModels whose adapters the API refuses, with the words that the user gets."""

from __future__ import annotations

REFUSED_LORA = [
    (
        "{model: {uri: hf://o/n}, engine: {type: custom, image: i, adapters: [{name: a, uri: hf://o/a}]}}",
        "remove adapters and use args",
    ),
    ("engine: {adapters: [{name: a, uri: hf://o/a}]}", "remove adapters, and set lora and their spec.adapter"),
    ("{model: {uri: hf://o/n}, engine: {type: vllm, lora: {}}}", "or name the adapters in adapters"),
    ("engine: {lora: {}, args: [--max-loras=4]}", "needs the administration where it is: remove them from args"),
    ("{accelerator: {nodes: 2}, engine: {tensorParallel: 2, lora: {}}}", "remove engine.lora, or set"),
]
REFUSED_MODELS_WITH_ADAPTERS = [
    ("adapter: {uri: hf://o/a}\ntargetModels: [{name: a}]", "remove targetModels, or let those of another"),
    ("adapter: {uri: hf://o/a}\nfallbackPools: [{name: other}]", "would answer without the adapter"),
    ("adapter: {uri: path:///models/a}", "running pods get an adapter from hf://, s3://, gs:// or pvc://"),
]
