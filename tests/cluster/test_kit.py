"""The figures of the journeys, and the commands that they take from the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from e2e.cluster.place import ROOT
from e2e.kit import figures as kit
from e2e.kit import quick_start
from e2e.kit.figures import Figures, figure
from e2e.kit.traffic import Fate, Report, Stream


def test_streams_are_summed_and_the_worst_time_counts() -> None:
    assert figure("e2e.dropped_streams", [0, 2, 1]) == 3
    assert figure("e2e.drain_s", [6.0, 9.0, 7.0]) == 9.0
    assert figure("e2e.ready_to_routed_s.p95", [0.1] * 19 + [5.0]) == 0.1
    assert figure("e2e.ready_to_routed_s.p95", [0.1, 5.0]) == 5.0


def test_figures_have_the_benchmarks_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "ROOT", tmp_path)
    monkeypatch.delenv(kit.RECORD, raising=False)
    found = Figures()
    found.write()
    assert not (tmp_path / ".cache").exists(), "nothing was measured"
    found.add("e2e.drain_s", 4.0, 5.5)
    with pytest.raises(KeyError, match="unknown metric"):
        Figures().add("e2e.nonsense", 1.0)
    found.write()
    (told,) = json.loads((tmp_path / ".cache/e2e/e2e.json").read_text())["rows"]
    assert (told["metric"], told["value"]) == ("e2e.drain_s", 5.5)


def test_streams_that_a_user_would_see_fail_count_as_dropped() -> None:
    def stream(fate: str, status: int = 200) -> Stream:
        return Stream("short", "tiny", 0.0, fate=fate, status=status)  # type: ignore[arg-type]

    report = Report([stream("served"), stream("truncated"), stream("refused", 429), stream("refused", 503)])
    assert [(s.fate, s.status) for s in report.dropped] == [("truncated", 200), ("refused", 503)]


def test_the_quick_start_equals_the_docs_and_begins_with_the_readmes_commands() -> None:
    script = quick_start.commands()
    for command in (
        "helm install treeline",
        "kubectl apply -f manifests/samples/",
        "curl ",
        "helm uninstall",
    ):
        assert command in script
    assert "apiVersion" not in script, "only what a shell runs"
    (four,) = re.findall(r"^```sh\n(helm install .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert re.sub(r" +#.*", "", four) in re.sub(r" +#.*", "", script)


@pytest.mark.parametrize(
    ("fate", "text", "wrong"),
    [
        ("served", "1, 2, 3", False),
        ("served", "1, 2", True),
        ("served", "1, 2, 4", True),
        ("truncated", "1, 2", False),
        ("truncated", "1, 3", True),
        ("truncated", "1, 2, 3, 4", True),
        ("refused", "", False),
    ],
)
def test_a_stream_is_wrong_if_it_differs_from_its_answer_as_far_as_it_goes(fate: Fate, text: str, wrong: bool) -> None:
    assert Stream("long", "tiny", 0.0, fate=fate, text=text, answer="1, 2, 3").wrong is wrong
    assert not Stream("long", "tiny", 0.0, fate=fate, text=text).wrong, "its answer is not known"
