"""Writes a packaged chart as an OCI layout in a tar: `python scripts/chart_layout.py CHART.tgz LAYOUT.tar`.

helm writes to registries alone. Programs that read such a layout (oras, skopeo) copy it to one, and `helm install
oci://…` takes it from there. The media types are Helm's: https://helm.sh/docs/topics/registries/.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def layout(chart: Path) -> dict[str, bytes]:
    """Name → content of each file."""
    package = chart.read_bytes()
    with tarfile.open(chart) as packed:
        (stated,) = (member for member in packed if member.name.count("/") == 1 and member.name.endswith("/Chart.yaml"))
        described = packed.extractfile(stated)
        assert described is not None  # a file
        about = yaml.safe_load(described)
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(media: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    config, content = blob(CONFIG, json.dumps(about).encode()), blob(CHART, package)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [content]}
    entry = blob(MANIFEST, json.dumps(manifest).encode())
    entry["annotations"] = {"org.opencontainers.image.ref.name": about["version"]}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return files


def main() -> int:
    chart, target = Path(sys.argv[1]), Path(sys.argv[2])
    with tarfile.open(target, "w") as tar:
        for name, content in sorted(layout(chart).items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
