"""Who generates: Treeline's runtime, other servers, an engine in this process."""
