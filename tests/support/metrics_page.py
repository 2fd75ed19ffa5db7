"""Compares a process's page of metrics with the list that docs/metrics.md is made of."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from treeline_tools.metrics import Family


def shown(page: str) -> dict[str, Metric]:
    """Return the families of a page in Prometheus' text format, by the names of the list."""
    found = text_string_to_metric_families(page)
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in found}


def compare(page: str, listed: Iterable[Family]) -> set[str]:
    """Fail if the page has an unlisted metric, or one that differs from its entry. Return the listed metrics that are
    absent (they may have no value yet)."""
    known = {family.name: family for family in listed}
    there = shown(page)
    assert set(there) <= set(known), f"not listed: {sorted(set(there) - set(known))}"
    for name, family in there.items():
        wanted = known[name]
        assert (family.type, family.documentation) == (wanted.kind, wanted.text), name
        for sample in family.samples:
            assert sample.name in wanted.series, name
            assert set(sample.labels) - {"le"} == set(wanted.labels), name
    return set(known) - set(there)
