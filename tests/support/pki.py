"""Certificates of the tests' control plane: the benchmarks' own."""

from treeline_bench.control_plane.pki import Authority, Issued, context_of

__all__ = ["Authority", "Issued", "context_of"]
