"""The ext_proc protocol: Envoy's messages about a request, and the answers to them."""
