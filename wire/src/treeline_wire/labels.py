"""Kubernetes labels and annotations on the pods of a pool."""

POOL = "treeline.dev/pool"
ROLE = "treeline.dev/role"
"""The part of a request that the pod computes: "both", "prefill" or "decode"."""
SERVING = "treeline.dev/serving"
""""true" while the pod may get new requests, "false" while it drains."""

GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Labels of a LeaderWorkerSet's pods: which group a pod is of, and which one of it. Pod 0, the leader, serves the
requests."""

MIRROR_SUFFIX = "-gie"
"""Suffix of the name of the upstream InferencePool that mirrors one of ours."""

KV_EVENTS_PORT = "treeline.dev/kv-events-port"
KV_REPLAY_PORT = "treeline.dev/kv-replay-port"
KV_EVENTS_TOPIC = "treeline.dev/kv-events-topic"
DATA_PARALLEL_SIZE = "treeline.dev/data-parallel-size"
"""Annotations for engines that do not say where they publish KV events, and how many ranks count up from there. Without
a topic: all topics."""
KV_TRANSFER = "treeline.dev/kv-transfer"
"""Annotation for engines with the role prefill or decode that do not say how they hand prompts over: "nixl", "sglang"
or "llm-d"."""
ADAPTERS = "treeline.dev/adapters"
"""Annotation with the adapters that the pod is to have (`live_adapters`), of pods that can load them while they run."""
