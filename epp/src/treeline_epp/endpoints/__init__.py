"""The state of each endpoint: its address, its health and its load."""
