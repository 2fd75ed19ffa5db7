"""The folders of a cluster: the work folder, which `down` removes, and the cache, which it leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = ".treeline-e2e"


class ClusterError(RuntimeError):
    """The cluster cannot be had; the message says why and what to do."""


def cache_folder() -> Path:
    """Return the folder that keeps programs and images between clusters (as scripts/control_plane.sh does)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TREELINE_CACHE") or base / "treeline")


@dataclass(frozen=True)
class Home:
    """The work folder of one cluster. Only a folder that carries our mark is ever removed."""

    path: Path

    @classmethod
    def default(cls) -> Home:
        return cls(Path(os.environ.get("TREELINE_E2E_HOME") or "/var/lib/treeline-e2e").absolute())

    @property
    def kubeconfig(self) -> Path:
        return self.path / "kubeconfig"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def pids(self) -> Path:
        return self.path / "pids"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    def node(self, name: str) -> Path:
        """Return the folder of one node."""
        return self.path / "nodes" / name

    def make(self) -> None:
        """Take the folder. Raises ClusterError if it holds files that are not ours."""
        if self.path.exists() and not (self.path / MARK).exists() and any(self.path.iterdir()):
            raise ClusterError(f"{self.path} is not empty and not ours: choose another with TREELINE_E2E_HOME")
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MARK).touch()
        for folder in (self.logs, self.pids):
            folder.mkdir(exist_ok=True)

    def remove(self) -> None:
        """Remove the folder, unless something is mounted in it: then remove nothing."""
        self.empty()
        # the mark goes last: an interrupted removal can be taken up again
        (self.path / MARK).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()

    def empty(self) -> None:
        """Remove everything but the folder and its mark."""
        if not self.path.exists():
            return
        if not (self.path / MARK).exists():
            raise ClusterError(f"{self.path} does not carry our mark {MARK}: not removed")
        if mounted := mounts_below(self.path, Path("/proc/self/mountinfo").read_text()):
            raise ClusterError(f"still mounted, so {self.path} is not removed: {', '.join(mounted)}")
        for entry in self.path.iterdir():
            if entry.name == MARK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def mounts_below(folder: Path, mountinfo: str) -> list[str]:
    """Return the mount points in or at a folder, from the text of a mountinfo."""
    points = [line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines() if line]
    return [point for point in points if Path(point).is_relative_to(folder)]
