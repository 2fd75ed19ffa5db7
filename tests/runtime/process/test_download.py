"""Models from the Hugging Face Hub: the calls of its library, and the translation of its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from treeline_runtime.download import ModelNotFound, resolve_model


class Hub:
    """Stands in for `snapshot_download`."""

    def __init__(self, answer: Path | type[Exception]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, repo: str, **options: Any) -> str:
        self.asked.append((repo, options))
        if isinstance(self.answer, Path):
            return str(self.answer)
        raise self.answer.__new__(self.answer)  # these classes want a response to be constructed


def test_a_hub_id_is_downloaded_with_the_files_that_serving_needs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_model("org/some-model.v2@main") == model
    (_, small), (repo, options) = hub.asked
    assert (repo, options["revision"]) == ("org/some-model.v2", "main")
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(options["allow_patterns"])
    assert set(options["allow_patterns"]) - set(small["allow_patterns"]) == {"*.safetensors"}


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        assert directory == model
        raise LookupError("not served")

    hub = Hub(model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(LookupError, match="not served"):
        resolve_model("org/some-model", check=refuse)
    assert ["*.safetensors" in options["allow_patterns"] for _, options in hub.asked] == [False]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errors.GatedRepoError, "accept its terms on the Hub and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "check the name, or set HF_TOKEN"),
        (errors.RevisionNotFoundError, "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached"),
        (RuntimeError, "could not be downloaded: RuntimeError"),
    ],
)
def test_the_hubs_errors_are_reported_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], advice: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(error))
    with pytest.raises(ModelNotFound, match=advice):
        resolve_model("org/name@v9")


@pytest.mark.parametrize(
    "name", ["name", "./org/name", "org/name/more", "org/", "/org/name", "or g/name", "org/name@", "org/name@a b"]
)
def test_a_name_that_is_no_hub_id_is_a_missing_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(RuntimeError))
    with pytest.raises(ModelNotFound, match="there is no folder"):
        resolve_model(name)
