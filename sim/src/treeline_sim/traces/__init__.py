"""The traces by name."""

from __future__ import annotations

from treeline_sim.traces import prefixes, sessions
from treeline_sim.traces.base import Trace

TRACES: dict[str, Trace] = {trace.name: trace for trace in (*prefixes.TRACES, *sessions.TRACES)}


def trace_named(name: str) -> Trace:
    """Return a trace. Raises KeyError, which lists the valid names."""
    if name not in TRACES:
        raise KeyError(f"unknown trace {name!r}; there are: {', '.join(TRACES)}")
    return TRACES[name]
