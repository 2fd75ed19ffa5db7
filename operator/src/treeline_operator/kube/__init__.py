"""The API server as the operator talks to it; nothing else of the operator imports ``kubernetes``."""
