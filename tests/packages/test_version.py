"""The version of a checkout, and the files that a release writes it into."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import dist  # noqa: E402


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Create a repository of one commit, whose CHANGELOG names 0.3.0 first. Returns git."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.3.0 (unreleased)\n\n- x\n\n## 0.2.0 (2026-01-01)\n")
    monkeypatch.setattr(dist, "ROOT", tmp_path)

    def git(*words):
        by = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *by, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("add", "-A")
    git("commit", "-m", "one")
    return git


def test_a_tagged_commit_has_the_version_of_its_tag(checkout):
    checkout("tag", "v0.3.0")
    assert str(dist.version()) == "0.3.0"


def test_the_highest_of_several_tags_counts_and_an_invalid_one_is_refused(checkout):
    checkout("tag", "v0.3.0rc1")
    checkout("tag", "v0.3.0")
    assert str(dist.version()) == "0.3.0"
    checkout("tag", "v3-of-something")
    with pytest.raises(SystemExit, match="v3-of-something"):
        dist.version()


def test_a_commit_after_a_tag_is_a_development_version_of_the_changelogs_first_entry(checkout):
    checkout("tag", "v0.2.0")
    checkout("commit", "--allow-empty", "-m", "two")
    assert re.fullmatch(r"0\.3\.0\.dev1\+g[0-9a-f]{8}", str(dist.version()))


def test_without_tags_all_commits_are_counted(checkout):
    checkout("tag", "nightly")  # no version
    assert re.fullmatch(r"0\.3\.0\.dev1\+g[0-9a-f]{8}", str(dist.version()))


def test_a_shallow_clone_has_a_version(checkout, tmp_path, monkeypatch):
    checkout("commit", "--allow-empty", "-m", "two")
    checkout("clone", "--depth", "1", tmp_path.as_uri(), str(tmp_path / "shallow"))
    monkeypatch.setattr(dist, "ROOT", tmp_path / "shallow")
    assert re.fullmatch(r"0\.3\.0\.dev1\+g[0-9a-f]{8}", str(dist.version()))


def test_uncommitted_changes_prevent_a_release(checkout, tmp_path):
    checkout("tag", "v0.3.0")
    (tmp_path / "CHANGELOG.md").write_text("## 0.3.0\n")
    assert str(dist.version()).endswith(".dirty")


def test_sources_without_git_have_a_version_and_the_reason_why_nothing_is_built(tmp_path, monkeypatch):
    (tmp_path / "CHANGELOG.md").write_text("## 0.3.0 (unreleased)\n")
    monkeypatch.setattr(dist, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert str(dist.version()) == "0.3.0.dev0"
    with pytest.raises(SystemExit, match="no git checkout"):
        dist.write_tree(tmp_path / "tree", dist.version())


def test_a_changelog_without_a_version_is_refused(checkout, tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    with pytest.raises(SystemExit, match="names no version"):
        dist.version()


@pytest.mark.parametrize(
    ("version", "semver"),
    [("0.2.0", "0.2.0"), ("0.2.0rc1", "0.2.0-rc.1"), ("0.2.0.dev7+gabc.dirty", "0.2.0-dev.7"), ("1.0", "1.0")],
)
def test_charts_and_images_have_the_version_as_they_spell_it(version, semver):
    assert dist.semver(Version(version)) == semver


def projects() -> dict[str, dict]:
    return {room: tomllib.loads((ROOT / room / "pyproject.toml").read_text())["project"] for room in dist.DISTRIBUTIONS}


def ours(project: dict) -> list[str]:
    extras = (need for needs in project.get("optional-dependencies", {}).values() for need in needs)
    return [need for need in (*project["dependencies"], *extras) if re.match(r"treeline-[^=]*==", need)]


def test_the_checkout_has_one_version_the_next_one_of_the_changelog():
    expected = {f"{dist.upcoming()}.dev0"}
    assert {project["version"] for project in projects().values()} == expected, "run scripts/dist.py --next"
    assert {need.partition("==")[2] for project in projects().values() for need in ours(project)} == expected


def test_all_distributions_tell_the_same_of_the_project():
    for key in ("authors", "classifiers", "license", "requires-python", "urls"):
        assert len({str(project[key]) for project in projects().values()}) == 1, key


def test_the_version_reaches_every_distribution_their_pins_of_each_other_and_the_chart(tmp_path):
    dist.write_tree(tmp_path, Version("7.8.9"))
    assert (tmp_path / "cli" / "README.md").read_text().splitlines()[0] == "# Treeline"
    for room in dist.DISTRIBUTIONS:
        project = tomllib.loads((tmp_path / room / "pyproject.toml").read_text())["project"]
        assert project["version"] == "7.8.9"
        assert [need for need in ours(project) if not need.endswith("==7.8.9")] == []
        assert (tmp_path / room / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    chart = (tmp_path / "charts" / "treeline" / "Chart.yaml").read_text()
    assert "\nversion: 7.8.9\n" in chart
    assert "image: treeline-epp:7.8.9\n" in chart
    assert sorted(path.name for path in (tmp_path / "models" / "tiny").glob("*.py")) == []


def test_links_of_a_page_lead_into_the_repository_when_an_index_shows_it():
    page = "[a](../docs/x.md#y) [b](#here) [c](https://d/e) [f](tiny/README.md) ![g](../h.png)"
    at, raw = (f"https://github.com/treeline-dev/treeline/{form}/v7.8.9" for form in ("blob", "raw"))
    assert dist.with_absolute_links(page, "models", Version("7.8.9")) == (
        f"[a]({at}/docs/x.md#y) [b](#here) [c](https://d/e) [f]({at}/models/tiny/README.md) ![g]({raw}/h.png)"
    )
