"""`make release`: its refusals, and its results for a tag. Its docker only records calls."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from support.control_plane import programs_or_skip

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.deep, pytest.mark.integration, pytest.mark.timeout(900)]

DOCKER = """#!/bin/sh
[ "$1" != info ] || exit 0
echo "$(grep '^version' cli/pyproject.toml) $*" >> "$CALLS"
"""


class Checkout:
    """A repository with the tracked files of this one, committed once."""

    def __init__(self, folder: Path, helm: Path) -> None:
        self.folder, self.calls = folder / "checkout", folder / "calls"
        for name in subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split(
            "\0"
        ):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        programs = folder / "bin"
        programs.mkdir()
        (programs / "docker").write_text(DOCKER)
        (programs / "docker").chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "HELM": str(helm), "CALLS": str(self.calls)}
        self.git("init")
        (self.folder / ".git" / "info" / "exclude").write_text("/.venv\n")
        (self.folder / ".venv").symlink_to(ROOT / ".venv")
        self.commit()

    def git(self, *words: str) -> None:
        by = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        subprocess.run(["git", *by, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "--allow-empty", "-m", "x")

    def begin_changelog(self, text: str) -> None:
        page = self.folder / "CHANGELOG.md"
        page.write_text(text + "\n## 0.1.0 (2020-01-01)\n\n- the first\n")
        self.commit()

    def release(self, *words: str) -> subprocess.CompletedProcess[str]:
        script = [str(self.folder / "scripts" / "release.sh"), *words]
        return subprocess.run(script, capture_output=True, text=True, check=False, env=self._environment)


@pytest.fixture(scope="module")
def helm() -> Path:
    return programs_or_skip("helm")["helm"] / "helm"


@pytest.fixture
def checkout(tmp_path, helm) -> Checkout:
    return Checkout(tmp_path, helm)


def test_an_invalid_release_is_refused_with_what_to_do(checkout):
    def refusal() -> str:
        done = checkout.release()
        assert done.returncode == 1
        assert not (checkout.folder / "dist").exists()
        return done.stderr

    (checkout.folder / "LICENSE").write_text("")
    assert "not committed: commit them, or try with --dry-run" in refusal()
    checkout.begin_changelog("## 9.8.7 (unreleased)\n")
    assert "no tag: git tag -s vX.Y.Z" in refusal()
    checkout.git("tag", "v9.8.6")
    assert "CHANGELOG.md has no section '## 9.8.6 (DATE)'" in refusal()
    checkout.git("tag", "-d", "v9.8.6")
    checkout.git("tag", "v9.8.7")
    assert "CHANGELOG.md says '## 9.8.7 (unreleased)': put the date into it" in refusal()
    wrong = checkout.release("--push")
    assert (wrong.returncode, "no option '--push'" in wrong.stderr) == (1, True)


def test_a_tag_becomes_packages_chart_images_notes_sboms_and_checksums(checkout, helm, tmp_path):
    checkout.begin_changelog("# Changelog\n\n## 9.8.7 (2026-01-02)\n\n- what is new\n")
    checkout.git("tag", "v9.8.7")
    done = checkout.release()
    assert done.returncode == 0, done.stderr
    assert "nothing was pushed" in done.stderr
    made = checkout.folder / "dist" / "release"
    packages = sorted(path.name for path in (made / "python").iterdir())
    assert {"treeline_llm-9.8.7.tar.gz", "treeline_llm-9.8.7-py3-none-any.whl"} <= set(packages)
    assert len(packages) == 22
    assert (made / "NOTES.md").read_text().strip() == "- what is new"
    images = [f"treeline-{name}:9.8.7" for name in ("edge", "epp", "operator")]
    images += ["treeline-runtime:9.8.7-cpu", "treeline-runtime:9.8.7-cuda"]
    assert (made / "IMAGES").read_text().split() == images
    calls = checkout.calls.read_text().splitlines()
    assert len(calls) == 5
    assert {call.split(" build ")[0] for call in calls} == {'version = "9.8.7"'}
    assert [call for call in calls if " push " in call or "--push" in call] == []
    manifests = list(yaml.safe_load_all((made / "install.yaml").read_text()))
    assert "treeline-operator:9.8.7" in str(manifests)
    for image in ("operator", "epp", "edge", "runtime-cpu", "runtime-cuda"):
        told = json.loads((made / "sbom" / f"{image}.cdx.json").read_text())
        own = {c["name"]: c["version"] for c in told["components"] if c["name"].startswith("treeline")}
        assert set(own.values()) == {told["metadata"]["component"]["version"]} == {"9.8.7"}
    with registry(made / "chart" / "treeline-9.8.7.oci.tar") as at:
        pulled = [str(helm), "pull", f"oci://{at}/treeline", "--version", "9.8.7", "--plain-http", "-d", str(tmp_path)]
        told = subprocess.run(pulled, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "treeline-9.8.7.tgz").read_bytes() == (made / "chart" / "treeline-9.8.7.tgz").read_bytes()
    sums = dict(reversed(line.split("  ")) for line in (made / "SHA256SUMS").read_text().splitlines())
    files = [path for path in made.rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    assert sums == {str(path.relative_to(made)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def registry(layout: Path) -> Iterator[str]:
    """Run a registry that serves the contents of an OCI layout, in a tar, as `treeline`."""
    with tarfile.open(layout) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    (entry,) = json.loads(files["index.json"])["manifests"]
    tag = entry["annotations"]["org.opencontainers.image.ref.name"]

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            name = entry["digest"] if name == tag else name
            content = files.get(f"blobs/{name.replace(':', '/')}", b"")
            self.send_response(200 if content or self.path == "/v2/" else 404)
            self.send_header(
                "Content-Type", entry["mediaType"] if "/manifests/" in self.path else "application/octet-stream"
            )
            self.send_header("Docker-Content-Digest", name)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_without_a_tag_a_trial_gives_a_development_version_and_leaves_images_out_when_asked(checkout):
    checkout.begin_changelog("## 9.8.7 (unreleased)\n\n- what is coming\n")
    done = checkout.release("--dry-run", "--no-images")
    assert done.returncode == 0, done.stderr
    made = checkout.folder / "dist" / "release"
    assert [path.name for path in (made / "chart").glob("*.tgz")] == ["treeline-9.8.7-dev.2.tgz"]
    assert (made / "NOTES.md").read_text().strip() == "- what is coming"
    assert not (made / "IMAGES").exists()
    assert "images are left out" in done.stderr
