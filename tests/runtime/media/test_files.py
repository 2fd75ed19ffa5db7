"""Outputs in shared memory: one file for equal images, none while it is used removed, never more bytes than allowed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from treeline_runtime.media import files as module
from treeline_runtime.media.files import FullError, MediaFiles, Stored

MOST = 1000


def write(files: MediaFiles, digest: bytes, size: int) -> Stored:
    made = Stored(files.path_of(digest), size, 1, (1, 2, 2), (size,))
    with files.writing(digest, made) as file:
        file.write(bytes(size))
    return made


@pytest.fixture
def files() -> Iterator[MediaFiles]:
    made = MediaFiles(MOST)
    yield made
    made.close()


def test_the_least_recently_used_goes_first(files: MediaFiles) -> None:
    for name in (b"a", b"b"):
        write(files, name, 400)
    assert files.hold(b"a") is not None
    files.release(b"a")
    write(files, b"c", 400)
    assert [files.hold(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    assert sorted(os.listdir(Path(files.path_of(b"x")).parent)) == ["61", "63", "lock"]


def test_what_is_used_stays(files: MediaFiles) -> None:
    made = write(files, b"a", 600)
    files.hold(b"a")
    with pytest.raises(FullError):
        write(files, b"b", 600)
    assert os.path.getsize(made.path) == 600
    files.release(b"a")
    write(files, b"b", 600)
    assert not os.path.exists(made.path)


def test_an_interrupted_output_leaves_nothing(files: MediaFiles) -> None:
    made = Stored(files.path_of(b"a"), 500, 1, (1, 2, 2), (500,))
    with pytest.raises(KeyError), files.writing(b"a", made):
        raise KeyError
    with pytest.raises(FullError), files.writing(b"a", made):
        raise OSError(28, "no space")
    assert files.used == 0
    assert os.listdir(Path(made.path).parent) == ["lock"]


def test_the_same_image_twice_at_once_is_one_file(files: MediaFiles) -> None:
    made = Stored(files.path_of(b"a"), 300, 1, (1, 2, 2), (300,))
    with files.writing(b"a", made) as slow:
        os.rename(slow.name, slow.name + "x")  # as another thread names it
        write(files, b"a", 300)
        os.rename(slow.name + "x", slow.name)
        slow.write(bytes(300))
    assert files.used == 300


def test_the_folder_is_private_and_goes_with_its_server(files: MediaFiles) -> None:
    folder = Path(files.path_of(b"x")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    code = (
        "from treeline_runtime.media.files import MediaFiles; import os, signal; "
        "print(MediaFiles(9).path_of(b'x'), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(killed.stdout.strip()).parent
    assert left.is_dir()
    MediaFiles(9).close()
    assert not left.exists()
    assert folder.is_dir(), "another server's, which runs"


def test_little_shared_memory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 62)
    made = MediaFiles()
    assert Path(made.path_of(b"x")).parent.parent in (tmp_path, Path("/tmp"))
    assert 0 < made.most <= module.MOST_BYTES
    made.close()


class Uses(RuleBasedStateMachine):
    """Any order of writes and uses, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.files = MediaFiles(MOST)
        self.used: list[bytes] = []

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]), size=st.integers(1, 600))
    def write(self, name: bytes, size: int) -> None:
        try:
            write(self.files, name, size)
        except FullError:
            assert sum(os.path.getsize(self.files.path_of(held)) for held in set(self.used)) + size > MOST

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hold(self, name: bytes) -> None:
        if self.files.hold(name) is not None:
            self.used.append(name)

    @rule()
    def release(self) -> None:
        if self.used:
            self.files.release(self.used.pop(0))

    @invariant()
    def counts_are_right(self) -> None:
        folder = Path(self.files.path_of(b"x")).parent
        sizes = [path.stat().st_size for path in folder.iterdir() if path.name != "lock"]
        assert sum(sizes) == self.files.used <= MOST
        assert all(os.path.exists(self.files.path_of(name)) for name in self.used)

    def teardown(self) -> None:
        self.files.close()


TestUses = Uses.TestCase
TestUses.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
