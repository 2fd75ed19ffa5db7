"""The HTTPRoutes among the samples pass exactly the paths that an engine serves, as the operator's routes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from treeline_operator.plan.routes import matches_of
from treeline_wire.paths import INFERENCE

MANIFESTS = Path(__file__).parents[3] / "manifests"
ENGINES = {"existing-pods/pool.yaml": "vllm"}
"""The engine of the pods behind a route, by file."""


def routes(file: Path) -> list[dict[str, Any]]:
    return [obj for obj in yaml.safe_load_all(file.read_text()) if obj and obj.get("kind") == "HTTPRoute"]


def test_every_file_with_a_route_is_compared() -> None:
    found = {str(file.relative_to(MANIFESTS)) for file in MANIFESTS.rglob("*.yaml") if routes(file)}
    assert found == set(ENGINES)


@pytest.mark.parametrize("file", ENGINES)
def test_a_route_lets_through_the_inference_paths_of_its_engine(file: str) -> None:
    (route,) = routes(MANIFESTS / file)
    rules = route["spec"]["rules"]
    assert [match for rule in rules for match in rule["matches"]] == list(matches_of(INFERENCE[ENGINES[file]]))
    assert all(len(rule["matches"]) <= 64 and len(rules) <= 16 for rule in rules), "Gateway API's own bounds"
    assert len({yaml.safe_dump(rule["backendRefs"]) for rule in rules}) == 1
