"""Builds the distributions: a wheel and an sdist of each in dist/, the same bytes for the same commit.

`python scripts/dist.py [--out DIR]`. The version comes from git: at a tag vX.Y.Z it is X.Y.Z; elsewhere the version
that CHANGELOG.md names first, as a development version with the number of commits and the commit, such as
0.2.0.dev1501+g0750d2ac. It is written into a copy of the tracked files; the checkout keeps X.Y.Z.dev0, which `--next`
takes from CHANGELOG.md after a release. Images and chart of a release are built from such a copy too (`--tree DIR`
writes one). `--version` prints the version, `--semver` as charts and images spell it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = tuple(sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml")))
REPOSITORY = "https://github.com/treeline-dev/treeline"


def git(*words: str) -> str:
    """The output of git; empty if it fails, as without a checkout or a tag."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def upcoming() -> str:
    """The version that CHANGELOG.md names first."""
    found = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("CHANGELOG.md names no version: begin it with a section like '## 0.2.0 (unreleased)'")
    return found[1]


def version() -> Version:
    """The version of the checkout. A shallow one counts only its own commits; without git the number is 0."""
    dirty = ["dirty"] if git("status", "--porcelain", "--untracked-files=no") else []
    if not dirty and (tags := git("tag", "--points-at", "HEAD", "--list", "v[0-9]*").split()):
        try:
            return max(map(Version, tags))
        except InvalidVersion as error:
            raise SystemExit(f"a tag of this commit is no version ({error}): write v0.2.0 or v0.2.0rc1") from None
    last = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    commits = git("rev-list", "--count", f"{last}..HEAD" if last else "HEAD") or "0"
    local = ".".join([*(f"g{commit}" for commit in [git("rev-parse", "--short=8", "HEAD")] if commit), *dirty])
    return Version(f"{upcoming()}.dev{commits}" + (f"+{local}" if local else ""))


def semver(version: Version) -> str:
    """The version as charts and image tags spell it: without a local part, and with pre-releases after a hyphen."""
    later = [*(version.pre or ()), *(("dev", version.dev) if version.dev is not None else ())]
    return "-".join([version.base_version, *([".".join(map(str, later))] if later else [])])


def epoch() -> int:
    """The time of the commit, in Unix seconds, for every file that is built."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or 315532800)


def write_tree(target: Path, version: Version) -> None:
    """Copy the tracked files into an empty folder, and write the version into them."""
    names = git("ls-files", "-z").split("\0")
    if names == [""]:
        raise SystemExit("this is no git checkout: build from one, or build an sdist")
    for name in names:
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    write_version(target, version)
    for room in DISTRIBUTIONS:
        shutil.copy(target / "LICENSE", target / room / "LICENSE")
        # The page of treeline-llm is the project's own.
        folder = "." if room == "cli" else room
        page = (target / folder / "README.md").read_text()
        (target / room / "README.md").write_text(with_absolute_links(page, folder, version))
    for script in (target / "models" / "tiny").glob("*.py"):
        script.unlink()  # what trained the model is in the repository


def write_version(tree: Path, version: Version) -> None:
    """Into every pyproject.toml with its pins of the others, and into the chart, whose images have its version."""
    for room in DISTRIBUTIONS:
        project = tree / room / "pyproject.toml"
        text = re.sub(r'^version = ".*"', f'version = "{version}"', project.read_text(), count=1, flags=re.MULTILINE)
        project.write_text(re.sub(r'"(treeline-[^"=]+)==[^"]*"', rf'"\1=={version}"', text))
    chart = tree / "charts" / "treeline" / "Chart.yaml"
    numbered = chart.read_text()
    former = re.search(r"^appVersion: *(\S+)", numbered, re.MULTILINE)
    if former is not None:
        chart.write_text(numbered.replace(former[1], semver(version)))


def with_absolute_links(page: str, folder: str, version: Version) -> str:
    """A page whose links lead into the repository: a package index shows it without the files around it."""
    at = f"v{version}" if version.local is None else "main"

    def absolute(link: re.Match[str]) -> str:
        path, hash_mark, anchor = link[3].partition("#")
        inside = os.path.normpath(f"{folder}/{path}")
        return f"{link[1]}{link[2]}({REPOSITORY}/{'raw' if link[1] else 'blob'}/{at}/{inside}{hash_mark}{anchor})"

    return re.sub(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", absolute, page)


def reproducible(sdist: Path, seconds: int) -> None:
    """Rewrite an sdist with one time, order and owner, since setuptools takes the machine's."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = (
                seconds,
                0,
                0,
                "",
                "",
                {},
            )
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as target, gzip.GzipFile(filename="", fileobj=target, mode="wb", mtime=seconds) as stream:
        stream.write(packed.getvalue())


def build(tree: Path, out: Path) -> None:
    """All distributions of a tree, by `python -m build`: each wheel from its sdist, which proves the sdist whole."""
    seconds = epoch()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}
    for room in track(DISTRIBUTIONS, description="building", transient=True, disable=not sys.stderr.isatty()):
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree / room)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"dist: {room} cannot be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    for sdist in out.glob("*.tar.gz"):
        reproducible(sdist, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="where to (default: dist)")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="only write the sources with their version there")
    parser.add_argument("--version", action="store_true", help="only print the version")
    parser.add_argument("--semver", action="store_true", help="only print it as charts and images spell it")
    parser.add_argument(
        "--next", action="store_true", help="only number the checkout for what CHANGELOG.md names first"
    )
    args = parser.parse_args()
    if args.next:
        write_version(ROOT, Version(f"{upcoming()}.dev0"))
        return 0
    now = version()
    if args.version or args.semver:
        print(semver(now) if args.semver else now)
    elif args.tree:
        write_tree(args.tree, now)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        for old in (*args.out.glob("treeline_*.whl"), *args.out.glob("treeline_*.tar.gz")):
            old.unlink()
        with tempfile.TemporaryDirectory(prefix="treeline-dist-") as tree:
            write_tree(Path(tree), now)
            build(Path(tree), args.out)
        for made in sorted(args.out.glob("treeline_*")):
            print(f"{made.stat().st_size:>11,}  {made.name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
