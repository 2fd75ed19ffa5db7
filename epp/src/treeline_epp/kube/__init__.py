"""Endpoints and models from Kubernetes. Imported only on demand: the client costs 30 MB."""
