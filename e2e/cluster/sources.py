"""The files that an image is built from, read from its Dockerfile. A change of one makes another image."""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path

IGNORED = {"__pycache__", "build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", "checkpoints"}


def copied(dockerfile: str) -> list[str]:
    """Return the paths of the build context that a Dockerfile copies, in order, each once."""
    joined = re.sub(r"\\\n", " ", "\n".join(x for x in dockerfile.splitlines() if not x.lstrip().startswith("#")))
    paths: dict[str, None] = {}
    for line in joined.splitlines():
        words = shlex.split(line) if line.upper().startswith("COPY ") else []
        options = [w for w in words[1:] if w.startswith("--")]
        if any(option.startswith("--from=") for option in options):
            continue
        paths |= dict.fromkeys(w for w in words[1:-1] if not w.startswith("--"))
    return list(paths)


def files(root: Path, paths: list[str]) -> list[Path]:
    """Return the files at and below paths of the build context, without leftovers of builds and tests."""
    found: set[Path] = set()
    for path in paths:
        top = root / path
        below = [p for p in top.rglob("*") if p.is_file()] if top.is_dir() else [top]
        found.update(p for p in below if not _ignored(p.relative_to(root)))
    return sorted(found)


def _ignored(path: Path) -> bool:
    return any(part in IGNORED or part.endswith(".egg-info") for part in path.parts)


def fingerprint(root: Path, dockerfile: Path, *more: str) -> str:
    """Return a hash of everything that an image is built from; ``more`` are build arguments and the base image."""
    text = dockerfile.read_text()
    digest = hashlib.sha256("\0".join((text, *more)).encode())
    for file in files(root, copied(text)):
        digest.update(f"\0{file.relative_to(root)}\0{file.stat().st_mode & 0o111}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
