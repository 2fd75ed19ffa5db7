"""The ext_proc protocol: what Envoy says about a request, and what it is answered."""
