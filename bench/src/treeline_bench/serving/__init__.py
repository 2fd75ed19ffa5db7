"""`treeline bench serving`: load for any OpenAI server, and what its clients would see."""
