"""Processes for work on behalf of clients that might never end or need too much memory: limited, and killed beyond."""
