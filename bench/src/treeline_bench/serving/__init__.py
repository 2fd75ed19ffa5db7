"""`treeline bench serving`: load for any OpenAI server, measured as its clients see it."""
