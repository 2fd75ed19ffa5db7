import sys
from pathlib import Path

from treeline_wire.tiny_model import tiny_model

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_the_tiny_model_is_the_folder_of_the_repository():
    assert tiny_model() == ROOT / "models" / "tiny"


def test_where_the_package_is_not_installed_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "treeline_tiny", None)
    assert tiny_model() is None
