"""Processes for what may never end or want all memory, on behalf of clients: under limits, killed beyond them."""
