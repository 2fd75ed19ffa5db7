"""Hostile strings in pools and models: a program could take them for a flag, a variable, or two words."""

import json

HOSTILE_ENDS = (" x", *"\n\t\u00a0\u2028\u0000", "\u001b[0m", "$(HF_TOKEN)", "`id`", ";id", *"'\"é")
"""Endings that no name and no path may have: blanks, controls, variables that the kubelet replaces, shell syntax."""
HOSTILE_WORDS = ("--trust-remote-code", "-", *(f"a{end}" for end in HOSTILE_ENDS))
"""Words that no command line, path, label or header may contain."""

HOSTILE_STRINGS = [
    *(
        ("InferencePool", text.replace("WORD", json.dumps(bad)), field)
        for text, field in (
            ("model: {uri: hf://o/n, name: WORD}", "spec.model.name"),
            (
                "{model: {uri: hf://o/n}, engine: {type: vllm, adapters: [{name: WORD, uri: hf://o/a}]}}",
                "spec.engine.adapters[0].name",
            ),
            (
                "endpointPicker: {flowControl: {enabled: true, fairnessHeader: WORD}}",
                "spec.endpointPicker.flowControl.fairnessHeader",
            ),
            ("engine: {dtype: WORD}", "spec.engine.dtype"),
            ("engine: {quantization: WORD}", "spec.engine.quantization"),
            ("engine: {kvCacheDtype: WORD}", "spec.engine.kvCacheDtype"),
            ("engine: {evictionPolicy: WORD}", "spec.engine.evictionPolicy"),
            ("engine: {schedulePolicy: WORD}", "spec.engine.schedulePolicy"),
            ("accelerator: {type: nvidia, class: WORD}", "spec.accelerator.class"),
            ("accelerator: {type: nvidia, resourceName: WORD}", "spec.accelerator.resourceName"),
            ("{model: {uri: hf://o/n, tokenSecretRef: {name: WORD}}}", "spec.model.tokenSecretRef.name"),
            ("{model: {uri: hf://o/n, chatTemplateRef: {name: WORD}}}", "spec.model.chatTemplateRef.name"),
            ("{model: {uri: hf://o/n, cache: {claimName: WORD}}}", "spec.model.cache.claimName"),
            ("gateway: {name: WORD}", "spec.gateway.name"),
            ("gateway: {standalone: {apiKeysSecretRef: {name: WORD}}}", "apiKeysSecretRef.name"),
            ("gateway: {parentRefs: [{name: g, group: WORD}]}", "spec.gateway.parentRefs[0].group"),
            ("gateway: {parentRefs: [{name: g, kind: WORD}]}", "spec.gateway.parentRefs[0].kind"),
            ("gateway: {parentRefs: [{name: g}], hostnames: [WORD]}", "spec.gateway.hostnames[0]"),
        )
        for bad in HOSTILE_WORDS
    ),
    ("InferencePool", "{model: {uri: hf://o/n, name: 'a=/etc'}}", "spec.model.name"),
    *(
        ("InferencePool", f"engine: {{image: {json.dumps('i' + end)}}}", "spec.engine.image")
        for end in HOSTILE_ENDS[:7]
    ),
    *(
        ("InferenceModel", text.replace("WORD", json.dumps(bad)), field)
        for text, field in (
            ("modelName: WORD", "spec.modelName"),
            ("targetModels: [{name: WORD}]", "spec.targetModels[0].name"),
            ("fallbackPools: [{name: WORD}]", "spec.fallbackPools[0].name"),
        )
        for bad in HOSTILE_WORDS
    ),
]
