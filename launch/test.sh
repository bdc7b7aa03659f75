#!/usr/bin/env bash
# Set up the environment and run the test suite. Further arguments go to pytest, with paths
# relative to the checkout:
#
#   bash launch/test.sh tests/unit -k schedule
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev

cd "$ROOT"
# The tests start up to four processes on whatever cores there are.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MPLBACKEND=Agg
exec "$PY" -m pytest "$@"
