#!/usr/bin/env bash
# The test suite. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
# One torch thread a process: tests run engines side by side, and on two cores more threads only fight.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest "$@"
