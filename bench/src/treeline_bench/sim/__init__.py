"""A simulated engine: it speaks every contract of a runtime and computes nothing.

It answers at once, so that what is measured before it is the picker and Envoy. See `python -m treeline_bench.sim
--help`.
"""
