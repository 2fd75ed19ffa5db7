"""`treeline size`: which GPUs a model needs, from its config.json alone."""
