"""Endpoints and models from Kubernetes. Imported only when it is asked for: the client costs 30 MB."""
