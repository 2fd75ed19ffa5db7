"""What Envoy learns of endpoints."""
