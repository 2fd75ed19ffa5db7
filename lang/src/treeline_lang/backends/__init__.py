"""Backends: Treeline's runtime, other servers, or an engine in this process."""
