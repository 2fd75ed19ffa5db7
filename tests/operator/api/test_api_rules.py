"""Every rule of the API on a real API server: refusals with their words, and accepted objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from support.api_adapters import REFUSED_LORA, REFUSED_MODELS_WITH_ADAPTERS
from support.api_flow_control import ACCEPTED_FLOW_CONTROL, REFUSED_FLOW_CONTROL
from support.api_hostile import HOSTILE_ENDS, HOSTILE_STRINGS, HOSTILE_WORDS
from support.api_prefill import REFUSED_PREFILL
from support.api_specs import Chance, document
from support.control_plane import ControlPlane
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import KEYWORD, violations
from treeline_tools import crds

pytestmark = [pytest.mark.integration, pytest.mark.deep]

KINDS = {"InferencePool": InferencePool, "InferenceModel": InferenceModel}
REFUSED_POOLS = [
    *REFUSED_PREFILL,
    *REFUSED_LORA,
    *REFUSED_FLOW_CONTROL,
    ("model: {uri: az://bucket/model}", "no model URI: write hf://org/name"),
    ("model: {uri: hf://name}", "write hf://org/name or hf://org/name@revision"),
    ("model: {uri: hf://org/name@}", "write hf://org/name or hf://org/name@revision"),
    ("model: {uri: s3://Bucket/x}", "write s3://bucket/folder"),
    ("model: {uri: gs://-b/x}", "write gs://bucket/folder"),
    ("model: {uri: oci://ghcr.io/org/name}", "write oci://registry/org/name:tag"),
    ("model: {uri: 'oci://name:v1'}", "write oci://registry/org/name:tag"),
    ("model: {uri: 'oci://ghcr.io/org/name@sha256:abc'}", "write oci://registry/org/name:tag"),
    ("model: {uri: hf://o/n, credentialsSecretRef: {name: s}}", "credentialsSecretRef is for object stores"),
    ("model: {uri: 'pvc://Claim/x'}", "write pvc://claim/path"),
    ("model: {uri: 'pvc://claim//x'}", "write pvc://claim/path"),
    ("model: {uri: 'path://models/x'}", "write path:///models/name"),
    ("model: {uri: 'builtin://a/b'}", "write builtin://tiny"),
    ("model: {uri: 'path:///models/../etc'}", "remove '..'"),
    ("model: {uri: pvc://claim/..}", "remove '..'"),
    ("model: {uri: hf://o/n@..}", "remove '..'"),
    ("model: {uri: hf://o/n@refs/../x}", "remove '..'"),
    (
        "model: {uri: hf://o/n@a--b}",
        "-- and .. are not allowed in an hf:// uri",
    ),
    ("model: {uri: hf://a--b/c}", "-- and .. are not allowed in an hf:// uri"),
    ("model: {uri: hf://a/b..c}", "-- and .. are not allowed in an hf:// uri"),
    *(
        (f"{{model: {{uri: hf://o/n}}, gateway: {{isolation: PerKey{more}}}}}", "isolation needs API keys")
        for more in ("", ", standalone: {tls: {secretRef: {name: t}}}", ", parentRefs: [{name: g}]")
    ),
    ("{model: {uri: hf://o/n, pickerReadsClaim: true}, engine: {type: vllm}}", "the tokenizer is not on a claim"),
    ("model: {uri: hf://o/n, chatTemplateRef: {name: t}}", "remove model.chatTemplateRef and put it there"),
    ("model: {uri: pvc://c/m, pickerReadsClaim: true}", "engine treeline serves its tokenizer itself"),
    *(
        (f"model: {{uri: {json.dumps(form.format(bad))}}}", says)
        for form, says in (
            ("pvc://claim/{}", "write pvc://claim/path"),
            ("pvc://claim/a/{}", "write pvc://claim/path"),
            ("s3://bucket/{}", "write s3://bucket/folder"),
            ("gs://bucket/a/{}", "write gs://bucket/folder"),
            ("oci://r.io/o/n:{}", "write oci://registry/org/name:tag"),
            ("oci://r.io/o/n:v1/{}", "write oci://registry/org/name:tag"),
            ("path:///{}", "write path:///models/name"),
            ("path:///a/{}/b", "write path:///models/name"),
            ("hf://org/name@{}", "write hf://org/name or hf://org/name@revision"),
            ("hf://org/{}", "write hf://org/name or hf://org/name@revision"),
        )
        for bad in HOSTILE_WORDS
    ),
    *((f"model: {{uri: {json.dumps('builtin://tiny' + end)}}}", "write builtin://tiny") for end in HOSTILE_ENDS),
    ("model: {tokenSecretRef: {name: hf}}", "remove tokenSecretRef, or use an hf:// uri"),
    ("model: {uri: hf://o/n, size: 20Gi, cache: {size: 10Gi}}", "raise cache.size to model.size"),
    ("model: {uri: hf://o/n, cache: {}}", "set either claimName"),
    ("model: {uri: hf://o/n, cache: {claimName: a, size: 1Gi}}", "set either claimName"),
    ("model: {uri: hf://o/n, cache: {claimName: a, storageClassName: b}}", "replace claimName by size"),
    ("model: {uri: hf://o/n, cache: {claimName: a, accessModes: [ReadWriteOnce]}}", "replace claimName by size"),
    ("model: {cache: {size: 1Gi}}", "nothing is downloaded: remove model.cache"),
    ("{model: {uri: hf://o/n, tokenizer: hf://o/t}}", "remove model.tokenizer"),
    ("{engine: {type: sglang}}", "builtin:// models are in the image of engine treeline"),
    *(
        (f"endpointPicker: {{policyParameters: {{{parameter}: {value}}}}}", f"{parameter} is a parameter of {whose}")
        for parameter, value, whose in (
            ("cacheThreshold", 0.5, "cache_aware: remove it, or choose that policy"),
            ("balanceAbsThreshold", 8, "cache_aware and bucket"),
            ("balanceRelThreshold", 2, "cache_aware and bucket"),
            ("prefixTokenCount", 8, "prefix_hash"),
            ("loadFactor", 2, "prefix_hash and consistent_hashing"),
            ("bucketAdjustIntervalSecs", 1, "bucket"),
            ("loadS", 2, "lora_affinity"),
            ("rememberS", 2, "lora_affinity"),
        )
    ),
    ("accelerator: {count: 2}", "count is for GPUs only"),
    ("accelerator: {class: H100}", "class is for GPUs only"),
    ("accelerator: {resourceName: amd.com/gpu}", "resourceName is for GPUs only"),
    ("accelerator: {type: amd}", "engine treeline computes on CPUs and on NVIDIA's GPUs"),
    (
        "{model: {uri: hf://o/n}, accelerator: {type: amd}, engine: {type: vllm}}",
        "set engine.image to one of your engine for ROCm",
    ),
    (
        "{accelerator: {type: nvidia, count: 3}, engine: {tensorParallel: 2}}",
        "accelerator.count is not a multiple of tensorParallel",
    ),
    (
        "{accelerator: {type: nvidia, count: 1}, engine: {tensorParallel: 2}}",
        "set accelerator.count to tensorParallel times dataParallel",
    ),
    ("engine: {args: [--tp-size=2]}", "--tp-size (tensorParallel)"),
    ("engine: {args: [--dp-size, '2']}", "--dp-size (dataParallel)"),
    (
        "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 3}, engine: {type: vllm, tensorParallel: 2}}",
        "accelerator.count is not a multiple of tensorParallel",
    ),
    (
        "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 4},"
        " engine: {type: sglang, tensorParallel: 4, dataParallel: 2}}",
        "set accelerator.count to tensorParallel times dataParallel",
    ),
    ("engine: {args: [--nnodes=2]}", "--nnodes (accelerator.nodes)"),
    ("engine: {args: [--dist-init-addr, 'h:1']}", "remove them from args"),
    (
        "{accelerator: {type: nvidia, count: 3}, engine: {dataParallel: 4}}",
        "set accelerator.count to tensorParallel times dataParallel",
    ),
    (
        "{model: {uri: hf://o/n}, accelerator: {type: nvidia, nodes: 2}, engine: {type: vllm}}",
        "only engine treeline is started over several pods",
    ),
    ("{accelerator: {type: nvidia, count: 2, nodes: 2}, engine: {dataParallel: 2}}", "set accelerator.nodes or data"),
    ("{accelerator: {type: nvidia, nodes: 2}, engine: {args: [--pp-size=2]}}", "remove --pp-size from args"),
    ("{accelerator: {type: nvidia, nodes: 2}, engine: {args: [--pp-size, '2']}}", "remove --pp-size from args"),
    ("accelerator: {type: nvidia, count: 8, nodes: 9}", "a replica has at most 64 devices"),
    ("{accelerator: {type: nvidia, nodes: 2}, engine: {port: 29500}}", "the pods of a replica meet at port 29500"),
    ("accelerator: {nodes: 2}", "on CPUs to a multiple of accelerator.nodes"),
    ("{accelerator: {nodes: 2}, engine: {tensorParallel: 3}}", "tensorParallel counts devices of whole pods"),
    *(
        (
            f"{{accelerator: {{type: nvidia, count: 4, nodes: 2}}, engine: {{tensorParallel: {ranks}}}}}",
            "set it to accelerator.count times accelerator.nodes",
        )
        for ranks in (2, 6, 16)
    ),
    ("accelerator: {nodes: 0}", "accelerator.nodes"),
    ("engine: {port: 5557}", "ports 5557, 5657, 5757 and the following ones"),
    (
        "{model: {uri: hf://o/n}, engine: {type: vllm, dataParallel: 4, port: 5560}}",
        "as many as dataParallel",
    ),
    ("{model: {uri: hf://o/n}, engine: {type: custom}}", "set engine.image"),
    (
        "{model: {uri: hf://o/n}, engine: {type: custom, image: i, tensorParallel: 2}}",
        "remove tensorParallel and dataParallel and use args",
    ),
    *(
        (
            f"{{model: {{uri: hf://o/n}}, engine: {{type: custom, image: i, {setting}: {value}}}}}",
            f"{setting} is a setting of",
        )
        for setting, value in {
            "contextLength": 1,
            "memoryFraction": 0.5,
            "pageSize": 16,
            "maxRunningRequests": 1,
            "maxQueuedRequests": 1,
            "chunkedPrefillSize": 1,
            "maxTotalTokens": 1,
            "dtype": "float16",
            "quantization": "fp8",
            "kvCacheDtype": "fp8_e4m3",
            "threads": 1,
            "evictionPolicy": "lru",
            "schedulePolicy": "lpm",
        }.items()
    ),
    ("{model: {uri: hf://o/n}, engine: {type: vllm, threads: 2}}", "threads is a setting of treeline"),
    ("{model: {uri: hf://o/n}, engine: {type: vllm, maxTotalTokens: 2}}", "of treeline and sglang"),
    ("engine: {quantization: awq}", "engine treeline takes auto or fp8 as quantization: choose one of them"),
    ("engine: {dtype: int8}", "engine treeline takes auto, float32, bfloat16 or float16 as dtype"),
    ("engine: {kvCacheDtype: fp8_e5m2}", "engine treeline takes auto or fp8_e4m3 as kvCacheDtype"),
    ("engine: {evictionPolicy: random}", "engine treeline takes lru, lfu or priority as"),
    ("engine: {schedulePolicy: lifo}", "engine treeline takes fcfs, lpm or priority as"),
    (
        "{model: {uri: hf://o/n, name: m}, engine: {type: vllm, adapters: [{name: m, uri: hf://o/a}]}}",
        "an adapter has the name of the model",
    ),
    *(
        (shape.format(template), says)
        for shape in ("endpointPicker: {{template: {}}}", "gateway: {{standalone: {{template: {}}}}}")
        for template, says in (
            ("{metadata: {labels: {treeline.dev/x: y}}}", "labels of treeline.dev on pods are reserved"),
            ("{metadata: {annotations: {treeline.dev/kv-events-port: '1'}}}", "annotations of treeline.dev and"),
            ("{metadata: {labels: {'a b': y}}}", "write a name of 63 characters or fewer"),
            ("{metadata: {annotations: {'a b': y}}}", "write a name of 63 characters or fewer"),
        )
    ),
    ("engine: {args: [--port, '9000']}", "--port (engine.port)"),
    ("engine: {args: [--log-level, debug, --served-model-name=x]}", "--served-model-name (model.name)"),
    *(
        (f"{{model: {{uri: hf://o/n}}, engine: {{type: {engine}, {more}}}}}", says)
        for engine, more, says in (
            ("vllm", "args: [--port=1]", "the operator sets these flags of engine vllm"),
            ("vllm", "args: [--served_model_name, x]", "--served-model-name (model.name)"),
            ("sglang", "args: [--model-path=/x]", "the operator sets these flags of engine sglang"),
            ("vllm", "tensorParallel: 1, args: [-tp, '2']", "args and tensorParallel both set the number of devices"),
            (
                "sglang",
                "args: [--lora-paths, x=/x], adapters: [{name: a, uri: hf://o/a}]",
                "name all of them in the field",
            ),
            ("treeline", "args: [--max-images=3], media: {}", "media sets --max-images"),
            ("vllm", "media: {items: 1}", "remove media, and use args"),
        )
    ),
    ("gateway: {standalone: {}, parentRefs: [{name: g}]}", "remove standalone or parentRefs"),
    ("gateway: {hostnames: [a.example]}", "remove hostnames, or set parentRefs"),
    ("gateway: {parentRefs: [{name: g}, {name: g}]}", "a parent is named twice"),
    ("autoscaling: {maxReplicas: 3}", "remove minReplicas and maxReplicas"),
    ("autoscaling: {picker: {queuedTokens: 5}}", "picker is for type Picker only"),
    ("autoscaling: {type: Picker}", "set maxReplicas"),
    ("autoscaling: {type: Picker, minReplicas: 3, maxReplicas: 2}", "minReplicas is more than maxReplicas"),
    ("rollout: {maxSurge: 0}", "raise maxSurge or maxUnavailable"),
    ("rollout: {maxSurge: 0%, maxUnavailable: 0}", "raise maxSurge or maxUnavailable"),
    ("rollout: {maxSurge: 0, maxUnavailable: 0%}", "raise maxSurge or maxUnavailable"),
    (
        "disruptionBudget: {maxUnavailable: 0}",
        "would keep nodes from being drained: set maxUnavailable to 1 or more",
    ),
    (
        "disruptionBudget: {maxUnavailable: 0%}",
        "would keep nodes from being drained: set maxUnavailable to 1 or more",
    ),
    ("engine: {cache: {}}", "set either claimName"),
    ("engine: {cache: {claimName: a, accessModes: [ReadWriteMany]}}", "replace claimName by size"),
    ("rollout: {strategy: Replace, maxSurge: 10%}", "remove maxSurge, or use strategy SurgeIfCapacity"),
    ("rollout: {strategy: Replace, maxSurge: 2}", "remove maxSurge, or use strategy SurgeIfCapacity"),
    ("template: {metadata: {labels: {treeline.dev/pool: x}}}", "remove them from template.metadata.labels"),
    *(
        (
            f"template: {{metadata: {{annotations: {{{key}: x}}}}}}",
            "annotations of treeline.dev and controller.kubernetes.io/pod-deletion-cost on pods are reserved:"
            " remove them from template.metadata.annotations",
        )
        for key in (
            "treeline.dev/kv-events-port",
            "treeline.dev/draining-since",
            "treeline.dev/applied",
            "controller.kubernetes.io/pod-deletion-cost",
        )
    ),
    *(
        (f"gateway: {{standalone: {{annotations: {{a.b/c: d, {key}: x}}}}}}", "remove them from annotations")
        for key in ("treeline.dev/applied", "kubectl.kubernetes.io/last-applied-configuration")
    ),
    *(
        (
            form.replace("KEY", json.dumps(key)),
            "invalid key: write a name of 63 characters or fewer, or example.com/name",
        )
        for form in (
            "gateway: {standalone: {annotations: {KEY: x}}}",
            "template: {metadata: {labels: {KEY: x}}}",
            "template: {metadata: {annotations: {KEY: x}}}",
        )
        for key in ("", "a b", "-a", "a/b/c", "/a", "a/", "a\n", "A/b", "a" * 64, f"{'a' * 254}/b")
    ),
    ("{model: {uri: hf://o/n, name: 'm:8b'}, engine: {type: sglang}}", "choose a model.name without ':'"),
]
REFUSED_MODELS = [
    ("targetModels: [{name: a, weight: 1}, {name: b}]", "give every target a weight, or none"),
    ("fallbackPools: [{name: tiny}]", "remove it from fallbackPools"),
    *REFUSED_MODELS_WITH_ADAPTERS,
]
GROUPS = "{accelerator: {nodes: 2}, engine: {tensorParallel: 2}}"
REFUSED_NAMES = [
    ("InferencePool", "", "a" * 41, "use 40 characters or fewer"),
    ("InferencePool", GROUPS, "a" * 38, "use 37 characters or fewer"),
    ("InferencePool", "", "1st", "a letter first"),
    ("InferencePool", "", "a.b", "a letter first"),
    ("InferencePool", "", "tiny-epp", "are reserved for the operator's objects: choose another name"),
    ("InferenceModel", "", "a" * 41, "use 40 characters or fewer"),
]
REFUSED_BY_SHAPE = [
    ("InferencePool", "replicas: 1001", "spec.replicas"),
    ("InferencePool", "rollout: {maxSurge: 101%}", "spec.rollout.maxSurge"),
    ("InferencePool", "rollout: {maxSurge: '1'}", "spec.rollout.maxSurge"),
    ("InferencePool", 'rollout: {maxSurge: "5%\\n"}', "spec.rollout.maxSurge"),
    ("InferencePool", "rollout: {maxUnavailable: -1}", "spec.rollout.maxUnavailable"),
    ("InferencePool", "rollout: {maxUnavailable: 1001}", "spec.rollout.maxUnavailable"),
    ("InferencePool", "rollout: {surgeTimeoutSeconds: 604801}", "spec.rollout.surgeTimeoutSeconds"),
    ("InferencePool", "disruptionBudget: {maxUnavailable: 5 %}", "spec.disruptionBudget.maxUnavailable"),
    ("InferencePool", "model: {uri: ''}", "spec.model.uri"),
    ("InferencePool", "model: {size: -1}", "spec.model.size"),
    ("InferencePool", "model: {size: big}", "spec.model.size"),
    ("InferencePool", "engine: {type: unheard-of}", "spec.engine.type"),
    ("InferencePool", "engine: {memoryFraction: 1.0}", "spec.engine.memoryFraction"),
    ("InferencePool", "endpointPicker: {parameters: {maxTtftSeconds: 0}}", "maxTtftSeconds"),
    ("InferencePool", "endpointPicker: {policy: best}", "spec.endpointPicker.policy"),
    ("InferencePool", "endpointPicker: {policy: manual}", "spec.endpointPicker.policy"),
    (
        "InferencePool",
        "endpointPicker: {policy: cache_aware, policyParameters: {cacheThreshold: 2}}",
        "spec.endpointPicker.policyParameters.cacheThreshold",
    ),
    ("InferencePool", "endpointPicker: {policyParameters: {threshold: 1}}", "unknown field"),
    ("InferencePool", "drain: {timeoutSeconds: 0}", "spec.drain.timeoutSeconds"),
    ("InferencePool", f"gateway: {{name: {'g' * 41}}}", "spec.gateway.name"),
    (
        "InferencePool",
        "autoscaling: {type: HPA, maxReplicas: 2}",
        "spec.autoscaling.type",
    ),
    ("InferencePool", "template: {spec: {containers: [{name: a}, {name: a}]}}", "Duplicate value"),
    ("InferencePool", "template: {speck: {}}", "unknown field"),
    ("InferencePool", "engine: {threadz: 1}", "unknown field"),
    ("InferencePool", "gateway: {parentRefs: [{name: g}], hostnames: [a.b, a.b]}", "Duplicate value"),
    (
        "InferencePool",
        "{model: {uri: hf://o/n}, engine: {type: vllm, adapters: [{name: a, uri: hf://o/a},"
        " {name: a, uri: hf://o/b}]}}",
        "Duplicate value",
    ),
    ("InferenceModel", "modelName: ''", "spec.modelName"),
    ("InferenceModel", "modelName: a b", "spec.modelName"),
    ("InferenceModel", f"modelName: {'a' * 257}", "spec.modelName"),
    ("InferenceModel", "targetModels: [{name: a, weight: 0}]", "weight"),
    ("InferenceModel", "targetModels: [{name: a}, {name: a}]", "Duplicate value"),
    ("InferenceModel", "fallbackPools: [{name: b}, {name: b}]", "Duplicate value"),
    ("InferenceModel", "criticality: Urgent", "spec.criticality"),
    (
        "InferenceModel",
        f"targetModels: [{', '.join(f'{{name: m{i}}}' for i in range(11))}]",
        "at most 10 items",
    ),
]
ACCEPTED_POOLS = [
    "",
    "engine: {args: [--ports, --log-level, debug, --admin-host=0.0.0.0, --served]}",
    "{model: {uri: hf://o/n}, engine: {type: vllm, args: [-tp, '2', --max-model-len=9], contextLength: 8}}",
    "model: {uri: pvc://claim}",
    "model: {uri: s3://bucket/a/b.c, credentialsSecretRef: {name: s}, cache: {size: 2Gi}}",
    "model: {uri: gs://my_bucket.example, size: 2Gi}",
    "model: {uri: 'oci://registry.example:5000/org/name:v1.2/weights'}",
    "{model: {uri: hf://o/n, tokenizer: s3://b1/t, credentialsSecretRef: {name: s}}, engine: {type: vllm}}",
    "model: {uri: pvc://claim/a/b.c}",
    "model: {uri: 'hf://Qwen/Qwen3@refs/pr/1', tokenSecretRef: {name: hf, key: t}, size: 2Gi, cache: {size: 2Gi}}",
    "model: {uri: hf://o/n, size: 3, cache: {claimName: weights}}",
    "{model: {uri: path:///m, tokenizer: hf://o/t, tokenSecretRef: {name: h}, cache: {size: 1}}, engine: {type: vllm}}",
    "engine: {dtype: auto, quantization: auto, kvCacheDtype: auto, schedulePolicy: lpm}",
    "{model: {uri: hf://o/n}, engine: {type: vllm, quantization: gptq_marlin, kvCacheDtype: fp8, dtype: half}}",
    "{model: {uri: hf://o/n}, engine: {type: sglang, quantization: w8a8_int8, schedulePolicy: lof}}",
    "engine: {threads: 2, contextLength: 8, evictionPolicy: lru, resources: {requests: {cpu: 1, memory: 1Gi}}}",
    "{accelerator: {type: nvidia, class: H100}, drain: {timeoutSeconds: 3600}}",
    "accelerator: {type: nvidia, count: 4}",
    "{accelerator: {type: nvidia, count: 4}, engine: {tensorParallel: 4}}",
    "{accelerator: {type: nvidia, count: 4}, engine: {dataParallel: 4}}",
    "{accelerator: {type: nvidia, count: 4}, engine: {tensorParallel: 2, dataParallel: 2}}",
    "{accelerator: {type: nvidia, count: 8, nodes: 2}}",
    "{accelerator: {type: nvidia, count: 8, nodes: 4}, engine: {tensorParallel: 32}}",
    "{accelerator: {type: nvidia, count: 8, nodes: 4}, engine: {tensorParallel: 8}}",
    "{accelerator: {nodes: 2}, engine: {tensorParallel: 4}}",
    "engine: {tensorParallel: 2}",
    "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 8},"
    " engine: {type: sglang, tensorParallel: 8, dataParallel: 8, args: [--enable-dp-attention]}}",
    "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 4},"
    " engine: {type: vllm, tensorParallel: 2, dataParallel: 2, adapters: [{name: a, uri: pvc://c/a}]}}",
    "{model: {uri: path:///m}, engine: {type: custom, image: 'me/mine:1', port: 5557, command: [serve], args: [x]}}",
    "{engine: {type: vllm}, model: {uri: hf://o/n, tokenizer: pvc://c/m, pickerReadsClaim: true}}",
    "{engine: {type: custom, image: i}, template: {metadata: {annotations: {treeline.dev/kv-events-port: '5557'}}},"
    " model: {uri: path:///m}}",
    "{model: {uri: hf://o/n}, engine: {type: vllm, dataParallel: 4, port: 5561}}",
    "gateway: {parentRefs: [{name: g}, {name: g, sectionName: https}], hostnames: ['*.example.com']}",
    "{model: {uri: 'hf://o/n@v1.0', name: 'org/name:tag_1.0@x+y'}, engine: {type: vllm, dtype: bfloat16}}",
    "model: {uri: 'pvc://claim/.cache/a_b@1+2=3/v1'}",
    "gateway: {isolation: PerKey, standalone: {apiKeysSecretRef: {name: k}}}",
    "gateway: {isolation: Shared, standalone: {apiKeysSecretRef: {name: k}}}",
    "gateway: {isolation: Shared}",
    "gateway: {name: g, standalone: {serviceType: LoadBalancer, annotations: {a.b/c: d}, apiKeysSecretRef: {name: k}}}",
    "autoscaling: {type: Picker, minReplicas: 0, maxReplicas: 1}",
    "rollout: {strategy: Replace, maxSurge: 0, maxUnavailable: 1}",
    "rollout: {maxSurge: 0, maxUnavailable: 1, paused: true}",
    "rollout: {maxSurge: 25%, maxUnavailable: 100%, surgeTimeoutSeconds: 0}",
    "rollout: {strategy: Replace, maxSurge: 0%, maxUnavailable: 10%}",
    "disruptionBudget: {maxUnavailable: 25%}",
    "{replicas: 3, disruptionBudget: {maxUnavailable: 2}, rollout: {surgeTimeoutSeconds: 604800}}",
    "engine: {cache: {size: 10Gi, storageClassName: fast, accessModes: [ReadWriteMany]}}",
    "engine: {cache: {claimName: compiled}}",
    "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 8}, engine: {type: vllm}}",
    "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 8}, engine: {type: sglang, dataParallel: 4}}",
    "{model: {uri: hf://o/n}, accelerator: {type: nvidia, count: 8}, engine: {type: custom, image: i}}",
    "{model: {uri: 'hf://o/n@v1.0', name: 'm:8b'}, engine: {type: vllm}}",
    "template: {metadata: {labels: {a: b}, annotations: {kubectl.kubernetes.io/default-container: runtime}},"
    " spec: {containers: [{name: runtime, env: []}], hostIPC: true}}",
    "replicas: 0",
    *ACCEPTED_FLOW_CONTROL,
]
ACCEPTED_MODELS = [
    "",
    "modelName: org/name:tag",
    "{targetModels: [{name: a, weight: 1}, {name: b, weight: 99}], fallbackPools: [{name: b}], criticality: Sheddable}",
    "targetModels: [{name: a}]",
]


@pytest.fixture(scope="module")
def refusal(control_plane: ControlPlane) -> Iterator[Callable[[dict[str, Any]], str]]:
    """A function that returns the API server's refusal of an object, by a strict dry run; empty if it accepts."""
    control_plane.kubectl("create", "namespace", "rules")
    with control_plane.http() as http:

        def said(obj: dict[str, Any]) -> str:
            path = f"/apis/treeline.dev/v1alpha1/namespaces/rules/{obj['kind'].lower()}s"
            reply = http.post(path, params={"dryRun": "All", "fieldValidation": "Strict"}, json=obj)
            return "" if reply.is_success else str(reply.json()["message"])

        yield said


def broken(obj: dict[str, Any]) -> list[str]:
    """Return the rules that an object breaks, judged without an API server."""
    return list(violations(KINDS[obj["kind"]].from_object(obj, strict=True)))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        *(("InferencePool", *case) for case in REFUSED_POOLS),
        *(("InferenceModel", *case) for case in REFUSED_MODELS),
    ],
)
def test_invalid_specs_are_refused_with_the_fix(refusal, kind, text, message):
    obj = document(kind, text)
    assert message in refusal(obj)
    try:
        ours = broken(obj)
    except ValueError as refused:
        ours = [str(refused)]
    assert message in "\n".join(ours) or message.startswith("no model URI")


@pytest.mark.parametrize(("kind", "text", "name", "message"), REFUSED_NAMES)
def test_names_are_bounded_so_that_derived_names_fit(refusal, kind, text, name, message):
    obj = document(kind, text, name)
    assert message in refusal(obj)
    assert any(message in one for one in broken(obj))


@pytest.mark.parametrize(("kind", "text", "message"), REFUSED_BY_SHAPE)
def test_wrong_shapes_are_refused(refusal, kind, text, message):
    assert message in refusal(document(kind, text))


@pytest.mark.parametrize(("kind", "text", "field"), HOSTILE_STRINGS)
def test_an_ambiguous_string_is_refused_by_the_api_server_and_by_us(refusal, kind, text, field):
    obj = document(kind, text)
    assert field in refusal(obj)
    with pytest.raises(ValidationError):
        KINDS[kind].from_object(obj)


@pytest.mark.parametrize(
    ("kind", "text"),
    [*(("InferencePool", t) for t in ACCEPTED_POOLS), *(("InferenceModel", t) for t in ACCEPTED_MODELS)],
)
def test_valid_specs_are_accepted(refusal, kind, text):
    obj = document(kind, text)
    assert (refusal(obj), broken(obj)) == ("", [])


def test_every_rule_has_a_case_that_breaks_it():
    def messages(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from (rule["message"] for rule in schema.get(KEYWORD, ()))
            for inner in schema.values():
                yield from messages(inner)

    tried = [case[-1] for case in (*REFUSED_POOLS, *REFUSED_MODELS, *REFUSED_NAMES)]
    rules = {message for crd in crds.all_crds().values() for message in messages(crd["spec"]["versions"][0])}
    assert [rule for rule in rules if not any(message in rule for message in tried)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_api_server_and_we_judge_every_object_alike(refusal, kind):
    chance = Chance(seed=5)
    judged = {True: 0, False: 0}
    for _ in range(250):
        spec = chance.spec(kind)
        obj = {"apiVersion": "treeline.dev/v1alpha1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
        said, ours = refusal(obj), broken(obj)
        assert bool(said) == bool(ours), f"{yaml.safe_dump(spec)}\nAPI server: {said}\nwe: {ours}"
        for message in ours:
            assert message.split(": ", 1)[1] in said
        judged[not said] += 1
    assert min(judged.values()) >= 5, judged
