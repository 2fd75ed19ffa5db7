"""Parsing and routing of requests: the body, the model, the prompt's key, and refusals."""
