"""The wheels and sdists as users get them: their contents, their platforms, and a server from them."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from pathlib import Path

import httpx
import pytest
from packaging.metadata import Metadata
from packaging.version import Version
from support.ports import free_base
from support.stack import until

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import dist  # noqa: E402

pytestmark = [pytest.mark.deep, pytest.mark.integration, pytest.mark.timeout(900)]

UV = str(ROOT / ".venv" / "bin" / "uv")
TWINE = "twine==7.0.0"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*words: str | Path, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **more)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return a folder with all wheels and sdists."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, ROOT / "scripts" / "dist.py", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def version(built) -> str:
    (wheel,) = built.glob("treeline_llm-*.whl")
    return wheel.name.split("-")[1]


@pytest.fixture(scope="module")
def constraints(tmp_path_factory) -> Path:
    """Return the locked versions: no package is fetched that the checkout does not have."""
    file = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    texts = [(ROOT / "requirements" / name).read_text() for name in ("lock.txt", "lock-torch.txt")]
    file.write_text("\n".join(line.removesuffix(" \\") for line in "".join(texts).splitlines() if line[:1].isalnum()))
    return file


@pytest.fixture(scope="module")
def index() -> None:
    if run(UV, "pip", "compile", "--no-cache", "-", input="iniconfig").returncode:
        pytest.skip("no package index can be reached")


def contents(archive: Path) -> dict[str, bytes]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        files = [member for member in sdist.getmembers() if member.isfile()]
        return {member.name.partition("/")[2]: sdist.extractfile(member).read() for member in files}


def test_every_distribution_has_a_wheel_and_an_sdist_of_one_version_that_asks_for_the_others_by_it(built, version):
    for pattern in ("*.whl", "*.tar.gz"):
        assert len({re.match(r"treeline_[a-z]+", path.name)[0] for path in built.glob(pattern)}) == len(
            dist.DISTRIBUTIONS
        )
    for wheel in built.glob("*.whl"):
        (page,) = (text for name, text in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(page, validate=True)
        assert metadata.version == Version(version)
        assert metadata.license_expression == "Apache-2.0"
        assert metadata.project_urls["Homepage"] == dist.REPOSITORY
        assert metadata.description_content_type == "text/markdown"
        assert "](../" not in message_from_bytes(page).get_payload()
        own = [need for need in metadata.requires_dist or () if need.name.startswith("treeline-") and not need.extras]
        assert {str(need.specifier) for need in own} <= {f"=={version}"}


def test_a_wheel_has_its_package_and_its_licence_and_no_tests(built):
    for wheel in built.glob("*.whl"):
        names = contents(wheel)
        tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        assert len(tops) == 1, tops
        assert tops.pop().startswith("treeline")
        assert [name for name in names if re.search(r"(^|/)(tests?|conftest|test_[^/]*)(/|\.py$)", name)] == []
        assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_tiny_model_is_in_its_wheel_whole_and_nothing_beside_it(built):
    (wheel,) = built.glob("treeline_tiny-*.whl")
    found = {Path(name).name: text for name, text in contents(wheel).items() if name.startswith("treeline_tiny/")}
    files = [
        path for path in (ROOT / "models" / "tiny").iterdir() if path.suffix in (".json", ".jinja", ".safetensors")
    ]
    assert found == {path.name: path.read_bytes() for path in files}


def test_an_sdist_has_what_its_wheel_is_built_from(built):
    for sdist in built.glob("*.tar.gz"):
        assert {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= contents(sdist).keys()


def test_the_same_commit_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "DISTRIBUTIONS", ("lang",))
    made = []
    for name in ("one", "another"):
        tree, out = tmp_path / name / "tree", tmp_path / name / "out"
        dist.write_tree(tree, Version("7.8.9"))
        for path in tree.glob("lang/src/**/*.py"):
            os.utime(path, (len(made), len(made)))  # a checkout of another time
        dist.build(tree, out)
        made.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()})
    assert made[0] == made[1]
    assert len(made[0]) == 2


def test_the_packages_are_valid_for_an_index_with_their_pages(built, index):
    checked = run(UV, "tool", "run", "--quiet", "--from", TWINE, "twine", "check", "--strict", *built.iterdir())
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2 * len(dist.DISTRIBUTIONS)


def test_installed_by_uv_tool_it_serves_the_tiny_model_from_an_empty_folder(
    built, version, constraints, index, tmp_path
):
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    asked = [f"treeline-llm[runtime,picker]=={version}", "--find-links", built, "--constraints", constraints]
    installed = run(UV, "tool", "install", "--python", "3.11", *asked, env=CLEAN | places)
    assert installed.returncode == 0, installed.stderr
    treeline, empty = tmp_path / "bin" / "treeline", tmp_path / "empty"
    empty.mkdir()
    assert run(treeline, "version", env=CLEAN, cwd=empty).stdout == f"treeline {version}\n"
    help_of_up = run(treeline, "up", "--help", env=CLEAN, cwd=empty).stdout
    ports = dict.fromkeys(re.findall(r"--(?:[a-z-]+-)?port\b", help_of_up))
    words = [word for flag in ports for word in (flag, str(free_base(1)))]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        up = subprocess.Popen([treeline, "up", "--replicas", "1", *words], stdout=out, stderr=err, env=CLEAN, cwd=empty)
    try:

        def ready() -> bool:
            assert up.poll() is None, (tmp_path / "err").read_text()
            return "ready: " in (tmp_path / "out").read_text()

        until(ready, "treeline up is ready", 240, lambda: (tmp_path / "err").read_text())
        url = re.search(r"ready: (\S+)", (tmp_path / "out").read_text())[1]
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": "tiny", "messages": [question], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    assert list(empty.iterdir()) == []


def test_installed_by_pip_present_parts_work_and_missing_ones_say_how_to_install_them(
    built, version, constraints, index, tmp_path
):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin = tmp_path / "venv" / "bin"
    asked = [f"treeline-llm[lang,picker]=={version}", "--find-links", built, "--constraint", constraints]
    installed = run(bin / "pip", "install", "--quiet", *asked, env=CLEAN)
    assert installed.returncode == 0, installed.stderr
    program = "import treeline_lang; treeline_lang.gen('x', max_tokens=1)"
    assert run(bin / "python", "-c", program, env=CLEAN, cwd=tmp_path).returncode == 0
    pool = (ROOT / "manifests" / "samples" / "cpu-tiny.yaml").as_posix()
    planned = run(bin / "treeline", "operate", "plan", "-f", pool, env=CLEAN, cwd=tmp_path)
    assert "kind: Deployment" in planned.stdout, planned.stderr
    base = free_base(8)
    refused = run(bin / "treeline", "up", "model", "--port-base", str(base), env=CLEAN, cwd=tmp_path)
    assert refused.returncode == 1
    assert "a model needs the runtime: pip install 'treeline-llm[runtime]'" in refused.stderr
    up = subprocess.Popen(
        [bin / "treeline", "up", "--engine", "a=127.0.0.1:1", "--port-base", str(base)],
        env=CLEAN, cwd=tmp_path, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert up.stderr is not None
    shown = next((line for line in up.stderr if "engine a: not ready" in line), "")
    up.send_signal(signal.SIGINT)
    up.communicate()
    assert "127.0.0.1:1" in shown, "the picker runs without a runtime"
    assert run(bin / "pip", "check", env=CLEAN).returncode == 0


PLATFORMS = {
    "Linux, x86-64": "x86_64-manylinux_2_31",
    "Linux, arm64": "aarch64-manylinux_2_31",
    "macOS 15, Apple silicon": "aarch64-apple-darwin",
    "macOS, Intel": "x86_64-apple-darwin",
}
"""Names in docs/install.md → names of uv's resolver."""


def test_platforms_match_the_page(built, version, index):
    page = (ROOT / "docs" / "install.md").read_text()
    head, _, *rows = re.search(r"<!-- wheels:begin -->\n(.*)\n<!-- wheels:end -->", page, re.DOTALL)[1].splitlines()
    extras = [cell.strip(" `").replace("base", "") for cell in head.strip("|").split("|")[1:]]
    said = {}
    for row in rows:
        platform, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        said |= {(platform, extra): cell for extra, cell in zip(extras, cells, strict=True)}

    def resolves(place: tuple[str, str]) -> str:
        platform, extra = place
        where = ["--python-version", "3.11", "--python-platform", PLATFORMS[platform], "--only-binary", ":all:"]
        asked = f"treeline-llm[{extra}]=={version}" if extra else f"treeline-llm=={version}"
        environment = CLEAN | {"MACOSX_DEPLOYMENT_TARGET": "15.0"}
        done = run(UV, "pip", "compile", *where, "--find-links", built, "-", input=asked, env=environment)
        assert done.returncode == 0 or "No solution found" in done.stderr, done.stderr
        return "yes" if done.returncode == 0 else "no"

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(said, pool.map(resolves, said), strict=True))
    assert found == said
    assert len(found) == 4 * 7
