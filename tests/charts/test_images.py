"""Images are small, pinned and not root, and contain the packages that their code imports."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
ROOMS = {
    "operator": ("treeline_wire", "treeline_kube", "treeline_operator"),
    "epp": ("treeline_wire", "treeline_kube", "treeline_epp", "treeline_runtime.fetch"),
    "edge": ("treeline_operator.envoy",),
    "runtime": ("treeline_wire", "treeline_runtime"),
}
"""Our packages that run in each image."""

ELSEWHERE = {"operator": {"envoy", "opentelemetry", "google"}, "runtime": {"flashinfer", "triton"}}
"""Packages imported by modules that the image has and does not run: Envoy's launcher is the edge's, spans come from the
picker and the runtime, CUDA code runs only where CUDA is installed, and only the picker has Envoy's messages."""
COLOURS = {"rich_argparse"}
"""The help works without them."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, with continued lines joined and comments removed."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def packages(name: str) -> dict[str, str]:
    lines = (IMAGES / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.removesuffix(" \\").split("==") for line in lines if not line.startswith(("#", " ")))


def image_of(path: Path) -> str:
    return path.name.removesuffix(".Dockerfile")


def test_every_room_that_runs_in_a_cluster_has_an_image():
    assert {image_of(path) for path in DOCKERFILES} == set(ROOMS)


@pytest.mark.parametrize("path", DOCKERFILES, ids=image_of)
def test_a_dockerfile_keeps_the_rules(path):
    found = instructions(path)
    words = [word for word, _ in found]
    stages = [rest for word, rest in found if word == "FROM"]
    assert len(stages) > 1, "what builds is not shipped"
    assert {stage.split(" AS ")[0] for stage in stages} == {"${BASE_IMAGE}"}
    base = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)["BASE_IMAGE"]
    assert re.search(r":\d+\.\d+\.\d+-[^@]+@sha256:[0-9a-f]{64}$", base), "pinned to a release, by its digest"
    assert "ADD" not in words, "ADD fetches and unpacks; COPY says what it does"
    final = found[max(i for i, word in enumerate(words) if word == "FROM") :]
    users = [rest for word, rest in final if word == "USER"]
    assert [re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) is not None for user in users] == [True]
    assert [rest for word, rest in final if word == "RUN" and not rest.startswith("echo ")] == []
    assert [rest for word, rest in final if word == "ENTRYPOINT" and not rest.startswith("[")] == []
    for key in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{key}=" in dict(final)["LABEL"]
    for word, rest in found:
        assert not re.search(r"\b(curl|wget|git clone|apt-get|:latest)\b", rest), f"{word} {rest}"
        assert word != "ENV" or "NVIDIA_VISIBLE_DEVICES" not in rest


@pytest.mark.parametrize("path", DOCKERFILES, ids=image_of)
def test_steps_that_change_with_every_commit_come_last(path):
    """A builder's cache ends at the first step that a changed argument may affect: here, after all layers."""
    found = instructions(path)
    names = [rest.partition("=")[0] if word == "ARG" else "" for word, rest in found]
    first = min(names.index("VERSION"), names.index("REVISION"))
    assert {word for word, _ in found[first:]} == {"ARG", "LABEL"}
    final = found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]
    copies = [rest for word, rest in final if word == "COPY" and rest.startswith("--from=")]
    assert "/opt/treeline/venv" in copies[-1], "what we change most often is the last layer"


@pytest.mark.parametrize("path", DOCKERFILES, ids=image_of)
def test_packages_are_installed_from_exact_lists_alone(path):
    for _, rest in (i for i in instructions(path) if i[0] == "RUN"):
        for command in re.findall(r"\binstall\b(?: \S+)*?(?= &&|$)", rest):
            words = command.split()[1:]
            assert "--no-deps" in words, command
            by_hash = "--require-hashes" in words and "-r" in words
            assert by_hash or "--no-index" in words or words[-1] == "$torch", command


@pytest.mark.parametrize("name", [*ROOMS, "build", "torch-cuda", "torch-needs", "tools"])
def test_every_package_of_an_image_is_installed_by_the_hashes_of_its_files(name):
    text = (IMAGES / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    for line in text.splitlines()[1:]:
        requirement, *hashes = line.split(" --hash=")
        assert hashes, f"{requirement} has no hash"
        assert [h for h in hashes if not re.fullmatch(r"sha256:[0-9a-f]{64}", h.strip())] == []


def test_pip_refuses_a_file_whose_hash_is_not_listed(tmp_path):
    """The rule holds in pip itself: with a wrong hash in such a list nothing is installed."""
    wheel = tmp_path / "six-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("six.py", "")
        archive.writestr("six-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: six\nVersion: 1.0\n")
        archive.writestr("six-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("six-1.0.dist-info/RECORD", "")
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for digest, works in ((right, True), ("0" * 64, False)):
        (tmp_path / "list.txt").write_text(f"six==1.0 \\\n    --hash=sha256:{digest}\n")
        flags = [
            "--no-deps",
            "--require-hashes",
            "--no-index",
            "--find-links",
            tmp_path,
            "--dry-run",
            "--ignore-installed",
        ]
        pip = [sys.executable, "-m", "pip", "install", *flags, "-r", tmp_path / "list.txt"]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is works, done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=image_of)
def test_copied_files_exist_and_are_not_ignored(path):
    allowed = [
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for _, rest in (i for i in instructions(path) if i[0] == "COPY" and "--from" not in i[1]):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed


def test_the_lists_of_packages_are_those_of_the_lock_file():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "image_requirements.py", "--check"], check=False)
    assert done.returncode == 0, "run: python scripts/image_requirements.py"


def test_only_the_runtime_has_torch():
    assert packages("torch-cpu").keys() == {"torch"}
    assert packages("torch-cuda")["torch"] == packages("torch-cpu")["torch"]
    listed = {name for image in ROOMS for name in packages(image)}
    assert not {name for name in listed if name.startswith(("torch", "nvidia", "triton", "pytest"))}


SOURCES = sorted(ROOT.glob("*/src"))


@cache
def source_of(module: str) -> Path | None:
    """Return the file of one of our modules; None if there is no such module."""
    name = module.replace(".", "/")
    tried = (folder / path for folder in SOURCES for path in (f"{name}.py", f"{name}/__init__.py"))
    return next((path for path in tried if path.is_file()), None)


def imported_by(packages_of_ours: tuple[str, ...]) -> set[str]:
    """Return the top names of all foreign imports of these packages, and of our modules that they import."""
    todo = []
    for package in packages_of_ours:
        init = source_of(package)
        assert init is not None
        todo += sorted(init.parent.rglob("*.py"))
    seen, others = set(todo), set()
    while todo:
        for node in ast.walk(ast.parse(todo.pop().read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            others |= {name.partition(".")[0] for name in names}
            more = {source_of(name) for name in names if name.startswith("treeline")} - {None} - seen
            seen |= more
            todo += more
    return {name for name in others if not name.startswith("treeline")}


@pytest.fixture(scope="module")
def providers() -> Mapping[str, list[str]]:
    """Return for each top name the distributions that provide it."""
    return packages_distributions()


@pytest.mark.parametrize("image", ROOMS)
def test_an_image_has_every_package_that_its_code_imports(image, providers):
    has = {*packages(image), *(packages("torch-cpu") if image == "runtime" else ())}
    missing = {
        name
        for name in imported_by(ROOMS[image]) - set(sys.stdlib_module_names) - ELSEWHERE.get(image, set()) - COLOURS
        if not {canonicalize_name(provider) for provider in providers[name]} & has
    }
    assert missing == set()


def test_the_launcher_of_envoy_runs_in_an_image_that_has_wire_alone_and_nothing_that_wire_needs():
    from treeline_operator.envoy.keys import CLIENT_HEADER
    from treeline_wire import headers

    assert headers.CLIENT == CLIENT_HEADER
    absent = (
        "treeline_kube",
        "treeline_epp",
        "msgspec",
        "jinja2",
        "zmq",
        "tokenizers",
        "kopf",
        "aiohttp",
        "pydantic",
    )
    program = f"import sys; sys.modules |= dict.fromkeys({absent}); import treeline_operator.envoy.launcher"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_script_says_what_it_would_run():
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        script = [ROOT / "scripts" / "images.sh", "--dry-run", *words]
        return subprocess.run(script, capture_output=True, text=True, check=False)

    version = yaml.safe_load((ROOT / "charts" / "treeline" / "Chart.yaml").read_text())["appVersion"]
    plain = run("--tool", "podman").stdout.splitlines()
    assert [re.search(r"--tag (\S+)", line)[1] for line in plain] == [
        f"treeline-operator:{version}",
        f"treeline-epp:{version}",
        f"treeline-edge:{version}",
        f"treeline-runtime:{version}-cpu",
    ]
    (several,) = run("--tool", "docker", "--push", "--platform", "linux/amd64,linux/arm64", "epp").stdout.splitlines()
    assert several.startswith("docker buildx build --file images/epp.Dockerfile")
    assert "--push" in several
    pushed = run("--tool", "buildah", "--push", "--registry", "r.example/t/", "--tag", "x", "runtime-cuda").stdout
    assert re.search(r"buildah push --digestfile \S+ r\.example/t/treeline-runtime:x-cuda", pushed)
    assert "ACCELERATOR=cuda" in pushed
    assert "BASE_IMAGE=mine" in run("--tool", "buildah", "--base", "mine", "edge").stdout
    for wrong in (("nope",), ("--nope",), ("--tool", "nope"), ("--tag",)):
        refused = run(*wrong)
        assert refused.returncode == 1
        assert refused.stderr.startswith("images: ")


TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
for word in "$@"; do
  if [ "$file" = next ]; then file=$word; break; fi
  case $word in --digestfile|--metadata-file) file=next ;; esac
done
[ -z "$file" ] || echo "$DIGEST" > "$file"
"""


def test_pushed_images_are_signed_with_their_sboms_by_digest_if_cosign_is_installed(tmp_path):
    digest = "sha256:" + "ab" * 32
    calls = tmp_path / "calls"
    for name in ("docker", "buildah", "cosign"):
        (tmp_path / name).write_text(TOOL)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls)}

    def push(*words: str, tool: str = "docker", told: str = "", **more: str) -> tuple[int, list[str], str]:
        """Run scripts/images.sh with --push. Return its exit status, the calls of cosign, and its output."""
        calls.write_text("")
        script = [
            ROOT / "scripts" / "images.sh",
            "--tool",
            tool,
            "--registry",
            "r:5000/t",
            "--tag",
            "x",
            "--push",
        ]
        done = subprocess.run(
            [*script, *words, "epp"],
            env={**environment, "DIGEST": told, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [*calls.read_text().splitlines(), *done.stdout.splitlines()]
        return done.returncode, [line for line in lines if line.startswith("cosign")], done.stderr

    told = f'{{"containerimage.digest": "{digest}"}}'
    status, signs, said = push(told=told)
    assert status == 0, said
    assert signs == [
        f"cosign sign --yes r:5000/t/treeline-epp@{digest}",
        f"cosign attest --yes --type cyclonedx --predicate dist/sbom/epp.cdx.json r:5000/t/treeline-epp@{digest}",
    ]
    assert (ROOT / "dist" / "sbom" / "epp.cdx.json").exists()
    assert push("--no-sign", told=told)[:2] == (0, [])
    status, signs, said = push(told="")
    assert (status, signs) == (1, [])
    assert "is not signed" in said
    status, signs, _ = push("--dry-run", tool="buildah", COSIGN_KEY="cosign.key")
    assert signs[0].startswith("cosign sign --yes --key cosign.key r:5000/t/treeline-epp@sha256")
    (tmp_path / "cosign").unlink()
    status, _, said = push()
    assert status == 0
    assert "cosign is not installed" in said


def test_an_sbom_lists_an_images_packages_and_no_local_paths(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import sbom

    def component(name: str) -> dict[str, object]:
        return {"bom-ref": name, "name": name, "externalReferences": [{"url": f"file:///somewhere/{name}"}]}

    document = {
        "metadata": {"tools": []},
        "components": [component(name) for name in ("treeline_operator", "PyYAML", "torch")],
        "dependencies": [{"ref": "treeline_operator", "dependsOn": ["PyYAML", "torch"]}, {"ref": "torch"}],
    }
    made = sbom.part(document, "edge", {"treeline-operator", "pyyaml"}, "7.8.9")
    assert [c["name"] for c in made["components"]] == ["treeline_operator", "PyYAML"]
    assert [c.get("version") for c in made["components"]] == ["7.8.9", None]
    assert made["metadata"]["component"]["version"] == "7.8.9"
    assert "file:" not in str(made)
    assert made["dependencies"] == [
        {"ref": "treeline_operator", "dependsOn": ["PyYAML"]},
        {"ref": "image:edge", "dependsOn": ["treeline_operator"]},
    ]
    with pytest.raises(SystemExit, match="zmq"):
        sbom.part(document, "edge", {"zmq"}, "7.8.9")
    assert set(sbom.OWN) == {"operator", "epp", "edge", "runtime-cpu", "runtime-cuda"}
    assert "nvidia-cublas" in {n.removesuffix("-cu12").removesuffix("-cu13") for n in sbom.contents("runtime-cuda")}
    assert "torch" not in sbom.contents("epp")
