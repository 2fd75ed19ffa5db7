"""Benchmark `engines`: servers that are not ours behind our Envoy and picker."""
