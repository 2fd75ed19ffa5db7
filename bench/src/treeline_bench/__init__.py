"""Benchmarks: every figure Treeline states comes from a command in this package."""
