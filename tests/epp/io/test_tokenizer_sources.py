"""What `--tokenizer` and `--chat-template` may say, and tokenizers in folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.epp_io import small_bundle
from treeline_epp.options import options_of
from treeline_epp.tokenizers.sources import (
    FolderOrigin,
    ForModel,
    SourceError,
    TokenizerLoader,
    TokenizerSpec,
    specs_of,
)
from treeline_wire.models import HubModel
from treeline_wire.tokenizer import MAX_BUNDLE_BYTES


@pytest.mark.parametrize(
    ("text", "model", "source"),
    [
        ("models/tiny", "", Path("models/tiny")),
        ("tiny=models/tiny", "tiny", Path("models/tiny")),
        ("tiny=path:///models/tiny", "tiny", Path("/models/tiny")),
        ("tiny=file:///models/a%20b=c", "tiny", Path("/models/a b=c")),
        ("file:///models/b=c", "", Path("/models/b=c")),
        ("/models/m=/models/m", "/models/m", Path("/models/m")),
        ("org/m:7b=hf://org/m", "org/m:7b", HubModel("org/m")),
        ("hf://org/m@refs/pr/1", "", HubModel("org/m", "refs/pr/1")),
    ],
)
def test_a_tokenizer_is_for_a_model_or_for_all(text: str, model: str, source: object) -> None:
    (spec,) = specs_of([ForModel.parse(text)], [])
    assert (spec.model, spec.source) == (model, source)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tokenizer", "=x"], "names no model"),
        (["--tokenizer", "m="], "has no value"),
        (["--tokenizer", "m=hf://m"], "which looks like hf://org/name"),
        (["--tokenizer", "m=hf://a/../b"], "which looks like hf://org/name"),
        (["--tokenizer", "m=hf://a/b@"], "which looks like hf://org/name"),
        (["--tokenizer", "m=hf://a/b@c d"], "which looks like hf://org/name"),
        (["--tokenizer", "m=pvc://claim/m"], "mount the claim"),
        (["--tokenizer", "m=builtin://tiny"], "is not a source of tokenizers"),
        (["--tokenizer", "m=file://host/x"], "is not a source of tokenizers"),
        (["--tokenizer", "m=a", "--tokenizer", "m=b"], "--tokenizer is given twice for model 'm'"),
        (["--tokenizer", "a", "--tokenizer", "b"], "--tokenizer is given twice for all models"),
        (["--tokenizer", "m=a", "--chat-template", "n=t"], "--chat-template n=FILE needs --tokenizer n=URI"),
        (["--chat-template", "t"], "--chat-template FILE needs --tokenizer URI"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_start(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of(["--endpoint", "a=127.0.0.1:1", *flags])
    assert said in capsys.readouterr().err


def folder_at(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(small_bundle().tokenizer_json)
    (path / "chat_template.jinja").write_text("one")
    return path


def loader(folder: Path, template: Path | None = None) -> TokenizerLoader:
    return TokenizerLoader(TokenizerSpec("m", folder, template), FolderOrigin(folder), clock=iter(range(1000)).__next__)


def test_a_folder_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    found = loader(folder_at(tmp_path))
    first = found.load()
    assert first.chat_template == "one"
    assert found.load() is first
    (tmp_path / "chat_template.jinja").write_text("two!")
    assert found.load().chat_template == "two!"
    (tmp_path / "chat_template.jinja").unlink()
    assert found.load().chat_template is None


def test_a_folder_that_is_swapped_by_a_link_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes replaces what is in a mounted volume."""
    folder_at(tmp_path / "a")
    (folder_at(tmp_path / "b") / "chat_template.jinja").write_text("two")
    (tmp_path / "now").symlink_to("a")
    found = loader(tmp_path / "now")
    assert found.load().chat_template == "one"
    (tmp_path / "next").symlink_to("b")
    os.replace(tmp_path / "next", tmp_path / "now")
    assert found.load().chat_template == "two"


def test_a_template_of_its_own_replaces_the_models(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    found = loader(folder_at(tmp_path / "m"), template)
    bundle = found.load()
    assert (bundle.chat_template, bundle.tool_template) == ("mine", None)
    assert bundle.fingerprint != loader(tmp_path / "m").load().fingerprint
    template.write_text("other")
    assert found.load().chat_template == "other"
    template.unlink()
    with pytest.raises(SourceError, match="correct --chat-template"):
        found.load()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda at: None, "there is no directory .*: correct the path, or mount the volume"),
        (lambda at: at.write_text(""), "is a file: give the directory"),
        (lambda at: at.mkdir(), "has no tokenizer.json"),
        (lambda at: (folder_at(at) / "tokenizer_config.json").write_text("{"), "is not JSON.*copy the model's"),
        (lambda at: (folder_at(at) / "tokenizer.json").write_text("[]"), "is not a tokenizer.*copy the model's"),
        (lambda at: (folder_at(at) / "tokenizer_config.json").mkdir(), "is not a file"),
        (lambda at: os.truncate(folder_at(at) / "tokenizer.json", MAX_BUNDLE_BYTES + 1), "more than any tokenizer"),
    ],
)
def test_a_folder_that_is_of_no_use_says_why(tmp_path: Path, spoil: object, said: str) -> None:
    assert callable(spoil)
    spoil(tmp_path / "m")
    found = loader(tmp_path / "m")
    for _ in range(2):
        with pytest.raises(SourceError, match=said):
            found.load()


def test_a_name_of_the_hub_that_lacks_its_scheme_is_told_apart_from_a_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a model of the Hub is hf://nobody/nothing$"):
        loader(Path("nobody/nothing")).load()
    with pytest.raises(SourceError, match=r"the volume that it is on$"):
        loader(tmp_path / "nothing").load()
