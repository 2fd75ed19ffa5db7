"""Benchmark `operator`: the operator, and the picker's view of models, on a real API server."""
