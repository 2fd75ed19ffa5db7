#!/usr/bin/env bash
# The test suite on two workers, or what the arguments choose (they go to pytest) on one.
#   scripts/test.sh            what a change is tried with: nothing that is marked deep, and few examples of each property
#   scripts/test.sh --all      all of it, but for the servers of others (`make engines`)
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  # Each worker imports and runs rooms of its own (`HEAVY` in tests/conftest.py): two would import everything twice.
  "") set -- --dist each --tx popen//env:TREELINE_ROOMS=heavy --tx popen//env:TREELINE_ROOMS=others \
    -o console_output_style=classic -m "not deep and not engines" --hypothesis-profile quick ;;
  # A file's tests stay together: they share servers. The order of files is that of tests/conftest.py.
  --all) shift; set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10 -m "not engines" "$@" ;;
esac
exec .venv/bin/python -m pytest -q "$@"
