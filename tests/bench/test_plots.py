from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.bench import INVENTED, invented_result
from treeline_bench.plots import plot


@pytest.mark.parametrize(
    "name", [name if at < 4 else pytest.param(name, marks=pytest.mark.deep) for at, name in enumerate(INVENTED)]
)
def test_a_plot_is_an_svg_that_never_changes_by_itself(name: str, tmp_path: Path) -> None:
    first = plot(invented_result(name), tmp_path / "first.svg").read_bytes()
    second = plot(invented_result(name), tmp_path / "second.svg").read_bytes()
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert b"dc:date" not in first
    assert str(tmp_path).encode() not in first
