"""The lists of endpoints for Envoy."""
