"""Tokenizers of the Hub, fetched by its own library from a Hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import small_bundle
from support.fake_hub import FakeHub, FakeRepo, running_hub
from treeline_epp.tokenizers import hub as tokenizer_hub
from treeline_epp.tokenizers.hub import HubOrigin, TokenizerCache
from treeline_epp.tokenizers.sources import SourceError, TokenizerLoader, TokenizerSpec
from treeline_wire.models import HubModel
from treeline_wire.tokenizer import MAX_BUNDLE_BYTES, TokenizerBundle


def files(template: str = "{{ messages[0].content }}") -> dict[str, bytes]:
    """Return a repository's files, most of which no tokenizer needs."""
    return {
        "tokenizer.json": small_bundle().tokenizer_json.encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>"}).encode(),
        "chat_template.jinja": template.encode(),
        "additional_chat_templates/tool_use.jinja": b"tools",
        "model.safetensors": b"x" * 1000,
        "config.json": b"{}",
        "other/tokenizer.json": b"{}",
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub(words=FakeRepo(files())) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


def origin(cache: Path, uri: str = "hf://org/words", **limits: Any) -> HubOrigin:
    return HubOrigin(HubModel.parse(uri), uri, TokenizerCache(cache, **limits))


def loader(cache: Path, uri: str = "hf://org/words") -> TokenizerLoader:
    return TokenizerLoader(TokenizerSpec("m", HubModel.parse(uri)), origin(cache, uri))


def problem(cache: Path, uri: str = "hf://org/words") -> str:
    with pytest.raises(SourceError) as caught:
        loader(cache, uri).load()
    return str(caught.value)


def test_only_the_tokenizers_files_are_fetched_and_make_its_bundle(hub: FakeHub, tmp_path: Path) -> None:
    bundle = loader(tmp_path).load()
    assert bundle == TokenizerBundle.build(
        small_bundle().tokenizer_json,
        chat_template="{{ messages[0].content }}",
        tool_template="tools",
        special_tokens={"eos_token": "</s>"},
    )
    wanted = ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja", "tool_use.jinja"]
    assert sorted(hub.downloads()) == sorted(wanted)
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"], "what is kept is one file, and nothing else"


@pytest.mark.parametrize("commit", [None, "", "../../other", "..", "a b", "x" * 129, 7])
def test_a_hub_without_commits_is_reported(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: Any
) -> None:
    monkeypatch.setattr(FakeRepo, "commit", commit)
    assert "hf://org/words" in problem(tmp_path)
    assert hub.downloads() == []


def test_a_large_file_is_fetched_from_the_hubs_redirect(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/words"].large = ("tokenizer.json",)
    assert loader(tmp_path).load().tokenizer_json == small_bundle().tokenizer_json
    assert any("/store/" in path for _, path, _ in hub.asked)


def test_a_mirror_that_sends_more_than_it_lists_is_refused(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_hub, "MAX_BUNDLE_BYTES", 200)
    hub.sizes["tokenizer.json"] = 1
    assert "would send more of hf://org/words than it lists" in problem(tmp_path)
    assert "tokenizer.json" not in hub.downloads()


def test_a_token_opens_private_and_gated_repositories(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/words"].token = "hf_secret"
    said = problem(tmp_path)
    assert "hf://org/words is not on http" in said
    assert "set HF_TOKEN" in said
    hub.repos["org/words"].gated = True
    assert "is gated: accept its terms" in problem(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert loader(tmp_path).load().fingerprint
    assert hub.asked[-1][2] == "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    shutil.rmtree(tmp_path)
    assert "hf_wrong" not in problem(tmp_path)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("hf://org/nobody", "hf://org/nobody is not on http"),
        ("hf://org/words@v9", "hf://org/words@v9: there is no revision 'v9'; correct what is behind the @"),
    ],
)
def test_a_missing_repository_is_reported_with_a_remedy(hub: FakeHub, tmp_path: Path, uri: str, said: str) -> None:
    assert said in problem(tmp_path, uri)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda hub: hub.repos["org/words"].files.pop("tokenizer.json"), "has no tokenizer.json"),
        (lambda hub: hub.repos["org/words"].files.update({"tokenizer_config.json": b"[]"}), "cannot be used"),
        (lambda hub: hub.repos["org/words"].files.update({"tokenizer.json": b'{"model": {"a"'}), "is not a tokenizer"),
        (lambda hub: hub.sizes.update({"tokenizer.json": MAX_BUNDLE_BYTES}), "name a repository with fewer"),
        (
            lambda hub: hub.repos["org/words"].files.update(
                {f"additional_chat_templates/{i}.jinja": b"" for i in range(99)}
            ),
            "name a repository with fewer",
        ),
        (lambda hub: setattr(hub, "status", 403), "(403): set HF_TOKEN"),
        (lambda hub: setattr(hub, "status", 418), "answers 418"),
    ],
)
def test_an_unusable_repository_or_hub_has_a_reason(hub: FakeHub, tmp_path: Path, spoil: Any, said: str) -> None:
    spoil(hub)
    assert said in problem(tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.suffix == ".json"], "nothing is kept of it"


def test_a_full_or_read_only_disk_error_names_the_flag(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "give another directory with --tokenizer-cache" in problem(blocked / "below")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    said = problem(tmp_path)
    assert os.strerror(errno.ENOSPC) in said
    assert "make room, or give another directory with --tokenizer-cache" in said


def test_without_the_hub_the_cached_copy_is_used_and_a_remedy_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(words=FakeRepo(files())) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        fetched = loader(tmp_path).load()
    later = loader(tmp_path)
    assert later.kept() == fetched
    with pytest.raises(SourceError, match=r"cannot reach http://127.0.0.1:\d+ for hf://org/words: .*HF_ENDPOINT"):
        later.load()
    assert loader(tmp_path, "hf://org/words@main").kept() is None, "another revision is another tokenizer"


def test_a_cached_commit_needs_no_request(hub: FakeHub, tmp_path: Path) -> None:
    uri = f"hf://org/words@{hub.repos['org/words'].commit}"
    first = loader(tmp_path, uri).load()
    hub.asked.clear()
    again = loader(tmp_path, uri)
    assert again.kept() == first
    assert again.load() == first
    assert hub.asked == []


def test_only_a_moved_branch_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    now = [0.0]
    found = TokenizerLoader(TokenizerSpec("m", HubModel("org/words")), origin(tmp_path), clock=lambda: now[0])
    first = found.load()
    fetched = len(hub.downloads())
    asked = len(hub.asked)
    assert found.load() is first
    assert len(hub.asked) == asked, "it is not yet time to ask"
    now[0] += found.recheck_s
    assert found.load() is first
    assert (len(hub.downloads()), len(hub.asked)) == (fetched, asked + 1)
    hub.repos["org/words"].files = files("other: {{ messages[0].content }}")
    now[0] += found.recheck_s
    assert found.load().chat_template == "other: {{ messages[0].content }}"
    assert len(hub.downloads()) == 2 * fetched


def test_a_broken_or_foreign_cached_file_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    loader(tmp_path).load()
    (kept,) = tmp_path.iterdir()
    document = kept.read_bytes()
    for broken in (b"", document[: len(document) // 2], document.replace(b"hf://org/words", b"hf://org/other")):
        kept.write_bytes(broken)
        found = loader(tmp_path)
        assert found.kept() is None
        assert found.load().fingerprint
        assert loader(tmp_path).kept() is not None


def test_the_cache_keeps_the_newest_within_its_size(tmp_path: Path) -> None:
    cache = TokenizerCache(tmp_path, most_bytes=3 * len(small_bundle().to_json()))
    for i in range(5):
        cache.put(f"hf://org/m{i}", "0" * 40, small_bundle())
        (file,) = tmp_path.glob(f"org-m{i}.*")
        os.utime(file, (i, i))
    assert [cache.get(f"hf://org/m{i}") is not None for i in range(5)] == [False, False, False, True, True]


def test_leftovers_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".fetch-old", tmp_path / ".fetch-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{")
    os.utime(old, (0, 0))
    with TokenizerCache(tmp_path).workplace():
        pass
    assert list(tmp_path.iterdir()) == [new], "another picker may still be downloading the other"
