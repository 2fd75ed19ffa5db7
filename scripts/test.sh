#!/usr/bin/env bash
# The test suite on two workers, or what the arguments choose (they go to pytest) on one.
#   scripts/test.sh            what a change is tried with: nothing that is marked deep, and few examples of each property
#   scripts/test.sh --all      all of it, but for the servers of others (`make engines`)
set -euo pipefail
cd "$(dirname "$0")/.."
# A file's tests stay together: they share servers.
workers=(--numprocesses 2 --dist loadfile)
case ${1:-} in
  "") set -- "${workers[@]}" -m "not deep and not engines" --hypothesis-profile quick ;;
  --all) shift; set -- "${workers[@]}" --durations 10 -m "not engines" "$@" ;;
esac
exec .venv/bin/python -m pytest -q "$@"
