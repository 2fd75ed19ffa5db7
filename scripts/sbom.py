"""Writes an SBOM for each image, dist/sbom/IMAGE.cdx.json: CycloneDX, from the metadata of the packages installed here.

`python scripts/sbom.py [--version V] [--out DIR] [IMAGE…]`; the images are the ones in scripts/image_requirements.py,
the runtime's as runtime-cpu and runtime-cuda. cyclonedx-py describes the whole environment once; each image's file
keeps the packages of that image. The lock file ensures that the versions are the images'. The base image's packages are
not included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import image_requirements as images
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "dist" / "sbom"
TOOL = "cyclonedx-bom==7.5.0"

OWN = {
    "operator": ("treeline-wire", "treeline-kube", "treeline-operator", "treeline-llm"),
    "epp": ("treeline-wire", "treeline-kube", "treeline-epp", "treeline-llm"),
    "edge": ("treeline-wire", "treeline-operator"),
    "runtime-cpu": ("treeline-wire", "treeline-runtime", "treeline-llm"),
    "runtime-cuda": ("treeline-wire", "treeline-runtime", "treeline-llm"),
}
"""Image → our own distributions in it, as its Dockerfile installs them."""


def environment() -> dict[str, Any]:
    """CycloneDX of everything that is installed here."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "sbom.json"
        command = [
            str(ROOT / ".venv" / "bin" / "uv"),
            "tool",
            "run",
            "--quiet",
            "--from",
            TOOL,
            "cyclonedx-py",
        ]
        command += [
            "environment",
            "--output-reproducible",
            "--spec-version",
            "1.6",
            "--output-format",
            "JSON",
            "--no-validate",  # 20 s of the processor, for what the same library has just written
        ]
        subprocess.run([*command, "--output-file", str(target), sys.executable], check=True)
        document: dict[str, Any] = json.loads(target.read_text())
        return document


def contents(image: str) -> set[str]:
    """The names of all distributions in an image."""
    pins = images.locked()
    names = images.closure(images.direct(image.split("-")[0]), pins)
    if image == "runtime-cpu":
        names -= images.with_torch() - {images.TORCH}
    return {*names, *OWN[image]}


def part(document: dict[str, Any], image: str, names: set[str], released: str) -> dict[str, Any]:
    """The part of a document that describes these distributions, as the SBOM of an image of this version."""
    components = [_plain(c) for c in document["components"] if canonicalize_name(c["name"]) in names]
    components = [_numbered(c, released) if canonicalize_name(c["name"]) in OWN[image] else c for c in components]
    missing = names - {canonicalize_name(c["name"]) for c in components}
    if missing:
        raise SystemExit(f"not installed here, so not described: {', '.join(sorted(missing))}")
    kept = {c["bom-ref"] for c in components}
    dependencies = [
        {**d, "dependsOn": [ref for ref in d.get("dependsOn", ()) if ref in kept]}
        for d in document["dependencies"]
        if d["ref"] in kept
    ]
    subject = {
        "bom-ref": f"image:{image}",
        "type": "container",
        "name": f"treeline-{image}",
        "version": released,
    }
    own = [c["bom-ref"] for c in components if canonicalize_name(c["name"]) in OWN[image]]
    return {
        **document,
        "metadata": {**document["metadata"], "component": subject},
        "components": components,
        "dependencies": [*dependencies, {"ref": subject["bom-ref"], "dependsOn": own}],
    }


def _plain(component: dict[str, Any]) -> dict[str, Any]:
    """Removes the path of an editable room on this machine."""
    kept = [r for r in component.get("externalReferences", ()) if not r["url"].startswith("file:")]
    return {key: value for key, value in {**component, "externalReferences": kept}.items() if value != []}


def _numbered(component: dict[str, Any], released: str) -> dict[str, Any]:
    """Gives a package of ours the release's version, since the installed checkout has a development version."""
    purl = {"purl": f"{component['purl'].partition('@')[0]}@{released}"} if "purl" in component else {}
    return {**component, "version": released, **purl}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write an SBOM for each image.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of these: {', '.join(OWN)} (default: all)")
    parser.add_argument("--version", default=version("treeline-llm"), help="the images' version (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=TARGET, metavar="DIR", help="where to (default: dist/sbom)")
    args = parser.parse_args()
    chosen = args.images or list(OWN)
    if unknown := set(chosen) - set(OWN):
        raise SystemExit(f"no image {', '.join(sorted(unknown))}; there are: {', '.join(OWN)}")
    document = environment()
    args.out.mkdir(parents=True, exist_ok=True)
    for image in chosen:
        target = args.out / f"{image}.cdx.json"
        made = part(document, image, contents(image), args.version)
        target.write_text(json.dumps(made, indent=1) + "\n")
        sys.stdout.write(f"{target}: {len(made['components'])} components\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
