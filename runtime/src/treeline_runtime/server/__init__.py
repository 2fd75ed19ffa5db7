"""The HTTP side of the runtime: an ASGI application, OpenAI's and SGLang's protocols, probes and metrics."""
