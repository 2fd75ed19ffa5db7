#!/usr/bin/env bash
# Write anew everything that is made from the code. Tests say when one of these files is not current.
set -euo pipefail
cd "$(dirname "$0")/.."
py=.venv/bin/python

page() { # MODULE FILE: a page that a module prints; an error leaves the old one
  local text
  text=$($py -m "$1")
  printf '%s\n' "$text" > "$2"
}

$py -m treeline_operator.api          # crds/, the chart's templates of them and of the policies, docs/api.md
$py -m treeline_operator.rbac         # charts/treeline/files/rbac.yaml
page treeline_operator.status.page docs/reasons.md
$py scripts/image_requirements.py     # images/requirements/
$py scripts/chart_readme.py           # charts/treeline/README.md
scripts/control_plane.sh helm >/dev/null
$py scripts/install_manifest.py       # manifests/install.yaml, from the chart
$py scripts/code_map.py               # the code map in docs/architecture.md
