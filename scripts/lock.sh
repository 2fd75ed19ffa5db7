#!/usr/bin/env bash
# Resolve the rooms' dependencies and the development tools into requirements/lock.txt: exact versions and nothing else, for
# Linux and macOS, Python 3.11 and later. What torch alone needs (CUDA libraries, triton) is left to torch's own exact pins, so
# that TORCH_BACKEND=cpu can choose the small build from the same file.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=.venv/bin/uv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python - > "$work/direct.in" <<'PY'
import pathlib, tomllib

for project in sorted(pathlib.Path(".").glob("*/pyproject.toml")):
    for dependency in tomllib.loads(project.read_text())["project"]["dependencies"]:
        if not dependency.startswith("treeline"):
            print(dependency)
PY

"$uv" pip compile "$work/direct.in" requirements/dev.in --universal --python-version 3.11 \
  --no-header --no-annotate --no-emit-index-url --output-file "$work/lock.txt" --quiet
grep -Ev '^(nvidia-|cuda-|triton==)' "$work/lock.txt" > requirements/lock.txt
echo "requirements/lock.txt: $(wc -l < requirements/lock.txt) packages"
