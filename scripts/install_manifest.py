"""Writes manifests/install.yaml: the chart rendered with its default values, for installing without Helm.

`python scripts/install_manifest.py` rewrites it; with `--check` its exit status says whether it is current. helm is
`$HELM`, or the one that `scripts/control_plane.sh helm` builds, or the one on the PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "manifests" / "install.yaml"
NAMESPACE = "treeline-system"

HEAD = f"""\
# Treeline without Helm: the chart with its default values. Made by scripts/install_manifest.py; not to be edited.
#   kubectl apply --server-side -f manifests/install.yaml
#   kubectl -n {NAMESPACE} rollout status deployment/treeline-operator
# The images are named as scripts/images.sh builds them. `kubectl delete -f` removes everything, with it every pool.
---
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/part-of: treeline
    pod-security.kubernetes.io/enforce: restricted
"""


def helm() -> str:
    """The helm to use. SystemExit says how to get one."""
    if named := os.environ.get("HELM"):
        return named
    built = subprocess.run(
        [str(ROOT / "scripts" / "control_plane.sh"), "--check", "helm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode == 0:
        return str(Path(built.stdout.strip()) / "helm")
    if on_path := shutil.which("helm"):
        return on_path
    raise SystemExit("no helm here: run scripts/control_plane.sh helm")


def manifest(program: str) -> str:
    """The text of manifests/install.yaml."""
    command = [program, "template", "treeline", str(ROOT / "charts" / "treeline"), "--namespace", NAMESPACE]
    # without Helm nothing reads its annotation that keeps the CRDs
    command += ["--set", "crds.keep=false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    text = re.sub(r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n", "", done.stdout, flags=re.M)
    text = re.sub(r"^# Source: .*\n", "", text, flags=re.M)
    return HEAD + re.sub(r"\n\n+---", "\n---", text).rstrip() + "\n"


def main() -> int:
    made = manifest(helm())
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text() == made else 1
    TARGET.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
