import sys
from pathlib import Path

from treeline_wire.tiny_model import tiny_model

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_the_tiny_model_is_the_folder_of_the_repository():
    assert tiny_model() == ROOT / "models" / "tiny"


def test_without_its_package_there_is_no_tiny_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "treeline_tiny", None)
    assert tiny_model() is None
