#!/usr/bin/env bash
# What must hold before a commit. Every check runs even when an earlier one failed; the exit status is 0 when all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()

check() { # NAME COMMAND…
  local name=$1; shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}

collected() { # a list of all tests is worth printing only when one of them has an error
  local list
  list=$($bin/python -m pytest --collect-only -qq tests e2e 2>&1) || { tail -n 40 <<<"$list"; return 1; }
}

check "ruff: lint" $bin/ruff check .
check "ruff: format" $bin/ruff format --check .
check "mypy: types" $bin/mypy wire/src kube/src runtime/src epp/src operator/src lang/src sim/src bench/src conformance/src cli/src tools e2e
check "import-linter: the rooms" $bin/lint-imports
check "vulture: dead code" $bin/vulture
check "generated: the pages and the chart's files are current" env PYTHONPATH=tools $bin/python -m treeline_tools --check
check "mkdocs: the site, every link and anchor" scripts/docs.sh --build
check "pytest: every test can be imported" collected

if [ ${#failed[@]} -gt 0 ]; then
  printf 'check: failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
  exit 1
fi
echo "check: all clean"
