"""Real vLLM and SGLang servers on CPUs, requests to them, and their cache events."""
