"""Kubernetes labels and annotations on the pods of a pool."""

POOL = "treeline.dev/pool"
ROLE = "treeline.dev/role"
SERVING = "treeline.dev/serving"
""""true" while the pod may be chosen for new requests, "false" while it drains."""

MIRROR_SUFFIX = "-gie"
"""Ends the name of the Gateway API Inference Extension's InferencePool that mirrors one of ours for Gateways."""

KV_EVENTS_PORT = "treeline.dev/kv-events-port"
KV_REPLAY_PORT = "treeline.dev/kv-replay-port"
KV_EVENTS_TOPIC = "treeline.dev/kv-events-topic"
DATA_PARALLEL_SIZE = "treeline.dev/data-parallel-size"
"""Annotations: where an engine that does not say it publishes what its cache holds, and how many ranks count up from
there. Absent topic: every topic."""
