#!/usr/bin/env bash
# Make the environment if needed, check format and lint, run the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt tests/requirements.txt
.venv/bin/ruff format --check .
.venv/bin/ruff check .
# Two tests side by side, and one thread per process: several small processes share the cores. A process that has run out
# of tests takes over some of the other's, so both end together.
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
