"""Image layouts: small images of single programs, and a tar of a layout for `ctr images import`. No tools needed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
NAME = "io.containerd.image.name"


def write_program(layout: Path, name: str, program: Path, architecture: str = "amd64", path: str = "") -> None:
    """Put an image into a layout whose only file is a static program, run as user 65532. ``path`` is its place in the
    image: by default the root, under its own name. There is a folder for scratch."""
    path = path or program.name
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        scratch = tarfile.TarInfo("tmp")
        scratch.type, scratch.mode = tarfile.DIRTYPE, 0o1777
        layer.addfile(scratch)
        member = tarfile.TarInfo(path)
        member.size, member.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            layer.addfile(member, content)
    tar = buffer.getvalue()
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": [f"/{path}"], "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _blob(layout, CONFIG, json.dumps(config).encode()),
        "layers": [_blob(layout, LAYER, tar)],
    }
    _add(layout, name, _blob(layout, MANIFEST, json.dumps(manifest).encode()))


def names(layout: Path, rename: Mapping[str, str]) -> None:
    """Rename images that a builder wrote (``org.opencontainers.image.ref.name``) to the names that a cluster uses."""
    index = json.loads((layout / "index.json").read_text())
    for entry in index["manifests"]:
        annotations = entry.setdefault("annotations", {})
        if (theirs := annotations.get("org.opencontainers.image.ref.name")) in rename:
            annotations[NAME] = rename[theirs]
    (layout / "index.json").write_text(json.dumps(index))


def stream(layout: Path, there: Iterable[str], target: IO[bytes]) -> None:
    """Write a layout as a tar, without the layers that the receiver has (digests with their algorithm)."""
    skip = set(there)
    with tarfile.open(fileobj=target, mode="w|") as tar:
        for file in ("oci-layout", "index.json"):
            tar.add(layout / file, file)
        for digest, media in _blobs(layout):
            if media == LAYER and digest in skip:
                continue
            tar.add(layout / "blobs" / digest.replace(":", "/"), f"blobs/{digest.replace(':', '/')}")


def _blobs(layout: Path) -> list[tuple[str, str]]:
    """Return all blobs that the index leads to, each once: digest and media type."""
    found: dict[str, str] = {}
    for entry in json.loads((layout / "index.json").read_text())["manifests"]:
        found[entry["digest"]] = entry["mediaType"]
        manifest = json.loads((layout / "blobs" / entry["digest"].replace(":", "/")).read_text())
        for part in (manifest["config"], *manifest["layers"]):
            found[part["digest"]] = part["mediaType"]
    return list(found.items())


def _blob(layout: Path, media: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    path = layout / "blobs" / "sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}


def _add(layout: Path, name: str, manifest: dict[str, Any]) -> None:
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    path = layout / "index.json"
    index: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schemaVersion": 2, "manifests": []}
    index["manifests"].append({**manifest, "annotations": {NAME: name}})
    path.write_text(json.dumps(index))
