"""What Envoy is told of endpoints."""
