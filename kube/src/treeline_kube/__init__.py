"""The way to a Kubernetes API server: client, typed errors, list and watch."""
