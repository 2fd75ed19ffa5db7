"""Real vLLM and SGLang servers on CPUs, what they are asked, and what they say that they hold."""
