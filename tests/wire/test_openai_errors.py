"""The message of a 404 for a model lists the models there are, within bounds."""

from __future__ import annotations

from treeline_wire.openai_errors import MOST_MODELS, no_such_model

SAID = "The model `x` does not exist or you do not have access to it."


def test_the_models_that_are_served_are_listed() -> None:
    assert no_such_model("x", ["a", "b"]) == f"{SAID} Served: `a`, `b`."
    assert no_such_model("x", []) == SAID


def test_many_models_and_long_names_are_cut() -> None:
    many = no_such_model("x", [f"m{number}" for number in range(10_000)])
    assert many.endswith(f"`m{MOST_MODELS - 1}` and {10_000 - MOST_MODELS} more (GET /v1/models).")
    assert len(no_such_model("x" * 10**6, ["y" * 10**6] * 10**4)) < 300 * (MOST_MODELS + 2)
