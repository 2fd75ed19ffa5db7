"""The cases: expectations of a picker; importing this package registers them (`case.CASES`).

| module | cases |
|---|---|
| `choice` | P1 to P10, P12: the choice and its report |
| `flow` | the answers to messages and their order, in each body mode |
| `errors` | requests that get no endpoint |
| `bodies` | the body and headers of a request that reach the pod |
| `responses` | P13 and the response half |
| `streams` | streams and connections: resets, half-closes, many at once, slow readers |
| `rules` | P11, objectives, rewrites, routing by load |
| `operation` | P14, metrics, pods that come and go, the end |
"""

from treeline_conformance.cases import (
    bodies,
    choice,
    errors,
    flow,
    operation,
    responses,
    rules,
    streams,
)

__all__ = ["bodies", "choice", "errors", "flow", "operation", "responses", "rules", "streams"]
