"""Files of pages: what is not exactly the page that was asked for is a miss, and is deleted."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache.disk import HEADER, DiskTier
from treeline_runtime.kvcache.page import BadPage, PageFormat

FORM = PageFormat(b"f" * 16, 1000)
FILE_BYTES = HEADER.size + FORM.nbytes


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def page(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, FORM.nbytes, dtype=np.uint8)


def open_tier(folder: Path, pages: int = 10, form: PageFormat = FORM) -> DiskTier:
    return DiskTier(folder, pages * FILE_BYTES, form)


def put(tier: DiskTier, number: int) -> None:
    victims = tier.begin_write(digest(number))
    assert victims is not None
    tier.delete(victims)
    tier.write(digest(number), FORM.checksum(digest(number), page(number).data), page(number))
    tier.end_write(digest(number), written=True)


def get(tier: DiskTier, number: int) -> npt.NDArray[np.uint8]:
    found = np.zeros(FORM.nbytes, dtype=np.uint8)
    tier.read(digest(number), found)
    return found


def file_of(folder: Path, number: int) -> Path:
    return folder / f"{FORM.fingerprint.hex()}.{digest(number).hex()}"


def test_pages_come_back_and_outlive_the_process(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "new" / "folder")
    for number in range(3):
        put(tier, number)
        assert (get(tier, number) == page(number)).all()
    tier.close()
    again = open_tier(tmp_path / "new" / "folder")
    assert again.num_pages == 3
    assert again.num_bytes == 3 * FILE_BYTES
    assert (get(again, 2) == page(2)).all()
    assert not again.has(digest(3))


def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    put(open_tier(tmp_path / "pages"), 0)
    for path in [tmp_path / "pages", *(tmp_path / "pages").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def spoil(at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(spoil, (0, 7, 8, 24, 56, 64, HEADER.size, FILE_BYTES - 1)),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:10]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(file_of(path.parent, 1).read_bytes()),
    ],
)
def test_a_file_that_is_not_the_page_is_a_miss_and_deleted(tmp_path: Path, change: Callable[[Path], None]) -> None:
    tier = open_tier(tmp_path)
    for number in (0, 1):
        put(tier, number)
    change(file_of(tmp_path, 0))
    with pytest.raises(BadPage):
        get(tier, 0)
    assert not file_of(tmp_path, 0).exists()
    tier.forget(digest(0))
    assert not tier.has(digest(0))
    assert tier.num_bytes == FILE_BYTES
    assert (get(tier, 1) == page(1)).all()


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 0)
    file_of(tmp_path, 0).unlink()
    with pytest.raises(FileNotFoundError):
        get(tier, 0)


def test_the_least_recently_used_page_goes_first(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pages=3)
    for number in range(3):
        put(tier, number)
    tier.touch([digest(0)])
    put(tier, 3)
    assert [tier.has(digest(number)) for number in range(4)] == [True, False, True, True]
    assert not file_of(tmp_path, 1).exists()
    assert tier.num_bytes == 3 * FILE_BYTES


def test_pages_of_other_models_are_never_found_but_count(tmp_path: Path) -> None:
    old = open_tier(tmp_path, pages=2)
    put(old, 0)
    old.close()
    other = PageFormat(b"g" * 16, FORM.nbytes)
    tier = open_tier(tmp_path, pages=2, form=other)
    assert not tier.has(digest(0))
    assert tier.num_bytes == FILE_BYTES
    file = tmp_path / f"{other.fingerprint.hex()}.{digest(0).hex()}"
    file.write_bytes(file_of(tmp_path, 0).read_bytes())
    with pytest.raises(BadPage):
        get(tier, 0)
    tier.renew(FORM)
    assert tier.has(digest(0))


def test_a_smaller_limit_shrinks_the_folder_at_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(5):
        put(tier, number)
        os.utime(file_of(tmp_path, number), (number, number))
    tier.close()
    again = open_tier(tmp_path, pages=2)
    assert [again.has(digest(number)) for number in range(5)] == [False, False, False, True, True]
    assert not file_of(tmp_path, 0).exists()


def test_what_was_not_completed_is_deleted_at_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 0)
    tier.close()
    beside = Path(f"{file_of(tmp_path, 1)}.new")
    beside.write_bytes(b"half")
    assert open_tier(tmp_path).num_pages == 1
    assert not beside.exists()


def test_clear_deletes_everything(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 0)
    assert tier.clear() == [digest(0)]
    assert (tier.num_pages, tier.num_bytes) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    put(tier, 1)


def test_a_full_disk_leaves_no_file_and_its_room_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = open_tier(tmp_path)
    monkeypatch.setattr(os, "rename", full)
    assert tier.begin_write(digest(0)) == []
    with pytest.raises(OSError, match="No space"):
        tier.write(digest(0), 0, page(0))
    tier.end_write(digest(0), written=False)
    assert (tier.has(digest(0)), tier.num_bytes) == (False, 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_page_is_written_once_at_a_time(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert tier.begin_write(digest(0)) == []
    assert tier.begin_write(digest(0)) is None


def test_a_tier_that_is_smaller_than_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{FILE_BYTES - 1} is less than a page, which takes {FILE_BYTES} bytes"):
        DiskTier(tmp_path, FILE_BYTES - 1, FORM)


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    first = open_tier(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        open_tier(tmp_path)
    first.close()
    open_tier(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(tmp_path / "file")


def test_a_folder_that_cannot_be_read_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(ConfigError, match="cannot be used"):
            open_tier(tmp_path)
    open_tier(tmp_path)


def outside(tmp_path: Path) -> Path:
    """A folder with a file that must stay as it is."""
    there = tmp_path / "outside"
    there.mkdir()
    (there / "precious").write_text("precious")
    return there


def test_links_are_not_followed(tmp_path: Path) -> None:
    there, folder = outside(tmp_path), tmp_path / "pages"
    precious = there / "precious"
    tier = open_tier(folder)
    put(tier, 0)
    tier.close()
    (folder / FORM.fingerprint.hex()).symlink_to(there)
    file_of(folder, 1).symlink_to(precious)
    file_of(folder, 2).symlink_to(file_of(folder, 0))
    tier = open_tier(folder)
    assert tier.num_pages == 1
    Path(f"{file_of(folder, 3)}.new").symlink_to(precious)
    assert tier.begin_write(digest(3)) == []
    with pytest.raises(OSError, match="symbolic links"):
        tier.write(digest(3), 0, page(3))
    file_of(folder, 0).unlink()
    file_of(folder, 0).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        get(tier, 0)
    tier.end_write(digest(3), written=False)
    put(tier, 1)
    assert not file_of(folder, 1).is_symlink()
    tier.clear()
    assert precious.read_text() == "precious"
    assert [path.name for path in there.iterdir()] == ["precious"]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = outside(tmp_path) / "precious"
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(tmp_path / "pages")


def test_what_is_not_ours_stays_and_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("notes", "f" * 32, "f" * 64, file_of(tmp_path, 1).name + ".bak")]
    for path in others:
        path.write_text("")
    folders = [file_of(tmp_path, 2), tmp_path / "0a"]
    for path in folders:
        path.mkdir()
        (path / "file").write_text("")
    os.mkfifo(file_of(tmp_path, 3))
    tier = open_tier(tmp_path)
    assert tier.num_pages == 0
    tier.clear()
    assert all(path.exists() for path in [*others, *folders])


def test_a_pipe_in_a_pages_place_keeps_no_thread_waiting(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, 0)
    file_of(tmp_path, 0).unlink()
    os.mkfifo(file_of(tmp_path, 0))
    with pytest.raises(BadPage):
        get(tier, 0)
    assert not file_of(tmp_path, 0).exists()


def test_a_killed_server_leaves_a_folder_for_the_next(tmp_path: Path) -> None:
    """It is killed in the middle of a write."""
    code = (
        "import os, sys; from pathlib import Path; import numpy as np\n"
        "from treeline_runtime.kvcache.disk import DiskTier; from treeline_runtime.kvcache.page import PageFormat\n"
        "form = PageFormat(b'f' * 16, 1000); tier = DiskTier(Path(sys.argv[1]), 10000, form)\n"
        "page = np.zeros(1000, dtype=np.uint8)\n"
        "for i in range(3):\n"
        "    tier.begin_write(bytes([i]) * 32)\n"
        "    if i == 2: os.rename = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "    tier.write(bytes([i]) * 32, form.checksum(bytes([i]) * 32, page.data), page)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    tier = open_tier(tmp_path)
    assert [tier.has(digest(i)) for i in range(3)] == [True, True, False]
    assert not get(tier, 1).any()
    assert not list(tmp_path.glob("*.new"))
