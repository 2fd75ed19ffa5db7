#!/usr/bin/env bash
# The test suite: all of it on two workers, or what the arguments choose (they go to pytest) on one.
set -euo pipefail
cd "$(dirname "$0")/.."
# One torch thread a process: tests run engines side by side, and on two cores more threads only fight.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A file's tests stay together: they share servers.
[ $# -gt 0 ] || set -- --numprocesses 2 --dist loadfile --durations 10 -m "not engines"
exec .venv/bin/python -m pytest -q "$@"
