"""`treeline chat`: a chat in the terminal with any OpenAI-compatible server."""
