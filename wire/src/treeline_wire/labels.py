"""Kubernetes labels on the pods of a pool."""

POOL = "treeline.dev/pool"
ROLE = "treeline.dev/role"
SERVING = "treeline.dev/serving"
""""true" while the pod may be chosen for new requests, "false" while it drains."""
