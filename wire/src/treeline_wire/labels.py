"""Kubernetes labels on the pods of a pool."""

POOL = "treeline.dev/pool"
ROLE = "treeline.dev/role"
#: "true" while the pod may be chosen for new requests, "false" while it drains.
SERVING = "treeline.dev/serving"
