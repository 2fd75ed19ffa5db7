"""The work folder: taken and removed only when it is ours."""

from pathlib import Path

import pytest

from e2e.cluster.place import MARK, ClusterError, Home, mounts_below


def test_a_folder_with_somebody_elses_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("…")
    with pytest.raises(ClusterError, match="not ours"):
        Home(tmp_path).make()


def test_a_folder_without_our_mark_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("…")
    with pytest.raises(ClusterError, match="mark"):
        Home(tmp_path).remove()
    assert (tmp_path / "thesis.tex").exists()


def test_every_created_file_is_removed(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    (home.path / "nodes/node-1").mkdir(parents=True)
    (home.path / "nodes/node-1/link").symlink_to(tmp_path)
    home.remove()
    assert list(tmp_path.iterdir()) == []


def test_removing_a_link_keeps_its_folder(tmp_path: Path) -> None:
    home, other = Home(tmp_path / "home"), tmp_path / "other"
    home.make()
    other.mkdir()
    (other / "file").touch()
    (home.path / "link").symlink_to(other)
    home.remove()
    assert (other / "file").exists()


def test_an_interrupted_removal_can_be_resumed(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    home.empty()
    assert [p.name for p in home.path.iterdir()] == [MARK]
    home.remove()
    assert not home.path.exists()


def test_mounts_in_a_folder_are_found_but_not_those_beside_it() -> None:
    text = (
        "30 1 0:1 / /var/lib/treeline-e2e/nodes/a\\040b rw - tmpfs tmpfs rw\n"
        "31 1 0:1 / /var/lib/treeline-e2e-other rw - tmpfs tmpfs rw\n"
    )
    assert mounts_below(Path("/var/lib/treeline-e2e"), text) == ["/var/lib/treeline-e2e/nodes/a b"]
