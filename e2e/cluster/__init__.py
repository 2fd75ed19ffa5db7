"""A cluster to test on: an existing one, one by kind, or a real Kubernetes of our own on this machine. `python -m
e2e.cluster up|down|status`. See docs/e2e.md."""
