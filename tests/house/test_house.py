"""The house keeps its own rules, as documents and layout promise."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "wire": "treeline_wire",
    "kube": "treeline_kube",
    "runtime": "treeline_runtime",
    "epp": "treeline_epp",
    "operator": "treeline_operator",
    "lang": "treeline_lang",
    "sim": "treeline_sim",
    "bench": "treeline_bench",
    "conformance": "treeline_conformance",
    "cli": "treeline",
}
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(("room", "package"), ROOMS.items())
def test_a_room_is_a_typed_distribution_with_a_page_of_its_own(room, package):
    project = tomllib.loads((ROOT / room / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert (ROOT / room / "src" / package / "py.typed").exists()
    assert (ROOT / room / "README.md").read_text().startswith("# ")


@pytest.mark.parametrize("folder", ["operator", "tests/operator"])
def test_nothing_shadows_the_standard_library_module_operator(folder):
    assert not (ROOT / folder / "__init__.py").exists()


def locked() -> list[str]:
    """Return the packages of the lock files, each with its hashes in one line."""
    texts = [path.read_text() for path in sorted((ROOT / "requirements").glob("lock*.txt"))]
    assert len(texts) == 3
    return "".join(texts).replace("\\\n", "").splitlines()


def test_every_dependency_is_pinned_exactly_and_by_the_hashes_of_its_files():
    for line in locked():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^ ]+( ; .+?)?( +--hash=sha256:[0-9a-f]{64})+", line), line
    for room in ROOMS:
        for dependency in tomllib.loads((ROOT / room / "pyproject.toml").read_text())["project"]["dependencies"]:
            assert "==" in dependency, f"{room}: {dependency}"


def test_the_rooms_requirements_match_the_lock_file():
    names = {line.split()[0] for line in locked()}
    for room in ROOMS:
        for dependency in tomllib.loads((ROOT / room / "pyproject.toml").read_text())["project"]["dependencies"]:
            assert dependency.startswith("treeline") or dependency in names, f"{room}: {dependency}; run `make lock`"


def test_no_two_packages_here_own_one_file():
    """If two packages own a file, the one installed last overwrites the other's."""
    owners: dict[str, set[str]] = {}
    for package in distributions():
        name = package.name
        for line in (package.read_text("RECORD") or "").splitlines():
            owners.setdefault(line.rsplit(",", 2)[0], set()).add(name)
    shared = {file: names for file, names in owners.items() if len(names) > 1}
    assert len(owners) > 10_000
    assert not shared


def test_files_named_in_the_architecture_page_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(rf"`({'|'.join(ROOMS)})/([\w/{{}},]+)\.py`", page)
    assert len(named) > 30
    for room, path in named:
        folder, brace, names = path.partition("{")
        for name in names.removesuffix("}").split(",") if brace else [""]:
            assert (ROOT / room / "src" / ROOMS[room] / f"{folder}{name}.py").exists(), f"{room}/{path}"


def test_the_code_map_is_current_and_names_every_large_module_once():
    current = subprocess.run([sys.executable, ROOT / "scripts" / "code_map.py", "--check"], check=False).returncode == 0
    assert current, "run `python scripts/code_map.py`"
    page = (ROOT / "docs" / "code-map.md").read_text()
    named = re.findall(r"^\| `([a-z_]+/[a-z0-9_/]+\.py)` \| .+ \|$", page, re.MULTILINE)
    large = [
        f"{room}/{path.relative_to(ROOT / room / 'src' / package)}"
        for room, package in ROOMS.items()
        for path in (ROOT / room / "src" / package).rglob("*.py")
        if not path.name.startswith("__") and len(path.read_text().splitlines()) >= 100
    ]
    assert sorted(named) == sorted(large)


def test_links_between_the_pages_lead_somewhere():
    for page in [ROOT / name for name in TRACKED if name.endswith(".md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} → {target}"


def test_make_help_lists_the_targets():
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("help", "run", "test", "check", "bench", "fuzz", "clean", "model"):
        assert f"make {word}" in told


def test_no_tracked_file_is_large():
    large = [name for name in TRACKED if (ROOT / name).exists() and (ROOT / name).stat().st_size > 20 * 1024 * 1024]
    assert large == []


MODULES = [ROOT / name for name in TRACKED if name.endswith(".py") and (ROOT / name).exists()]


def test_no_module_is_longer_than_500_lines():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def functions(text):
    """Yield each function of a formatted module with its number of lines, by its indentation: parsing takes seconds."""
    inside, last, in_text = [], 0, False
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        said, was_in_text = line.lstrip(), in_text
        in_text ^= line.count('"' * 3) % 2 == 1
        if not said or (not was_in_text and said[0] in ")]}#"):
            last = last if not said or said[0] == "#" else number
            continue
        while not was_in_text and inside and len(line) - len(said) <= inside[-1][0]:
            _, first, name = inside.pop()
            yield name, last - first + 1
        if not was_in_text and (found := re.match(r"(?:async )?def (\w+)", said)):
            inside.append((len(line) - len(said), number, found[1]))
        last = number


def test_no_function_is_longer_than_60_lines():
    assert list(functions('def f(\n    a\n):\n    def g(): ...\n\n    x = """\nb\n"""\n\n\ny = 1')) == [
        ("g", 1),
        ("f", 8),
    ]
    found = {path.relative_to(ROOT): list(functions(path.read_text())) for path in MODULES}
    assert [(path, *one) for path, every in found.items() for one in every if one[1] > 60] == []


@pytest.mark.parametrize("package", ["wire", "kube", "runtime", "epp", "operator", "sim", "bench", "conformance"])
def test_no_modules_of_a_room_import_each_other_in_a_circle(package: str):
    graph = grimp.build_graph(f"treeline_{package}", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # Whoever imports nothing that is left is in no circle; what remains in the end is.
    while free := [module for module, others in imports.items() if not others & imports.keys()]:
        for module in free:
            del imports[module]
    assert set(imports) == set()
