#!/usr/bin/env bash
# Write anew everything that is made from the code. Tests say when one of these files is not current.
set -euo pipefail
cd "$(dirname "$0")/.."
py=.venv/bin/python
shopt -s nullglob

PYTHONPATH=tools $py -m treeline_tools # crds/, the chart's CRDs, policies, rights and dashboards, docs/{api,commands,events,http-api,metrics,reasons,serve}.md
$py scripts/image_requirements.py     # images/requirements/
$py scripts/chart_readme.py           # charts/treeline/README.md
scripts/control_plane.sh helm >/dev/null
$py scripts/install_manifest.py       # manifests/install.yaml, from the chart
$py scripts/step_timeline.py docs/img/*-timeline.json # docs/img/, from records of a GPU
$py scripts/code_map.py               # docs/code-map.md
