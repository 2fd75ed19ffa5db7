"""The runtime: an inference engine with a radix cache behind an OpenAI-compatible server."""
