"""The list of metrics is read from the code: all of it, or an error names the place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.metrics_page import compare
from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.queue import Outcome
from treeline_operator.world import Key, Ref
from treeline_tools import metrics


def test_the_operators_metrics_equal_the_page():
    shown = Metrics()
    shown.finished(Key("pool", "team", "a"), Outcome(retry=True), 0.1, 0.2)
    shown.requested("get", "pods", 200, 0.1)
    shown.drifted("Deployment")
    shown.dropped("full")
    shown.leads(True)
    shown.watch_ages = lambda: {"pods": 1.0}
    ref = Ref("treeline.dev/v1alpha1", "InferencePool", "team", "a")
    shown.conditions(ref, [{"type": "Ready", "status": "True", "reason": "Serving"}])
    page = "\n".join(line for line in shown.text().decode().splitlines() if "_created" not in line)
    assert compare(page, metrics.families()["operator"]) == set()


EVERY = [family for found in metrics.families().values() for family in found]


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_a_help_text_is_understood_alone(family):
    assert re.fullmatch(r"[A-Z1e].* .*\.", family.text), "a sentence or what is counted, with a full stop"
    assert not re.match("Of these|Time that|The same", family.text), "the text refers to the line before"
    assert ("econds" in family.text) == ("_seconds" in family.name), "the unit"


def test_a_name_stands_for_one_metric():
    every = [family for found in metrics.families().values() for family in found]
    assert len(metrics.by_series()) == sum(len(family.series) for family in every)


def observed(folder: Path, body: str) -> list[metrics.Family]:
    (folder / "samples.py").write_text(
        f"from treeline_epp.metrics import MOST_CLIENTS\nSOME = 0.5\n\ndef samples(found, more):\n{body}"
    )
    return list(metrics._observed(folder))


def test_yielded_samples_are_found(tmp_path):
    body = """    text, one = "Things.", {"kind": "a"}
    yield "gauge", "things", text, {}, 1
    with found:
        if more:
            one: dict[str, str] = {"kind": more}
            yield "counter", "others", f"Others of {SOME:g} s.", {**one, "reason": found}, 2
        else:
            text = "More."
    yield "gauge", "more", text, one, 3
    for what, text in (("in", "Came."), ("out", "Went.")):
        yield "counter", f"bytes_{what}", text, {}, 4
    text = f"{MOST_CLIENTS} more."
    for key in more:
        yield "gauge", "each", text, {"key": key}, 5
    yield "neither", "of", "these", {}, 6
    def inner():
        yield "gauge", "inner", "Inner.", {}, 7
"""
    assert observed(tmp_path, body) == [
        ("treeline_epp_things", "gauge", (), "Things."),
        ("treeline_epp_others_total", "counter", ("kind", "reason"), "Others of 0.5 s."),
        ("treeline_epp_more", "gauge", ("kind",), "More."),
        ("treeline_epp_bytes_in_total", "counter", (), "Came."),
        ("treeline_epp_bytes_out_total", "counter", (), "Went."),
        ("treeline_epp_each", "gauge", ("key",), "100 more."),
        ("treeline_epp_inner", "gauge", (), "Inner."),
    ]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ('"gauge", f"things_{found}", "Things.", {}, 1', "the text `found` is not written down"),
        ('"gauge", "things", found.text, {}, 1', "the text `found.text` is not written down"),
        ('"gauge", "things", f"{more} things.", {}, 1', "the text `more` is not written down"),
        ('"gauge", "things", "Things.", found.labels, 1', "the labels `found.labels` is not written down"),
        ('"gauge", "things", "Things.", {found: "a"}, 1', "the text `found` is not written down"),
    ],
)
def test_unreadable_metrics_are_reported_by_line(tmp_path, sample, said):
    with pytest.raises(metrics.NotUnderstood, match=rf"samples\.py:5: .*{re.escape(said)}"):
        observed(tmp_path, f"    yield {sample}\n")


def test_two_descriptions_of_one_metric_are_an_error(tmp_path):
    body = '    yield "gauge", "things", "Things.", {}, 1\n    yield "gauge", "things", "Other things.", {}, 1\n'
    with pytest.raises(metrics.NotUnderstood, match="described in two ways"):
        observed(tmp_path, body)
