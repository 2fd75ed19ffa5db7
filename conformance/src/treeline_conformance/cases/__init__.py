"""What is expected of a picker, case by case; importing this package registers them (`case.CASES`).

| module | cases |
|---|---|
| `choice` | P1 to P10, P12: how the choice is made and reported |
| `flow` | which messages are answered, in which order, in each body mode |
| `errors` | requests that get no endpoint |
| `bodies` | what becomes of a request's body and headers |
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
