#!/usr/bin/env bash
# Train a small LLaMA on the documentation of this machine, vanilla and with SALAAD side by side, and compare them.
# Usage: bash scripts/demo.sh [--quick] [--output FOLDER]
set -euo pipefail
from=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt  # which changes into the repository
root=$PWD
cd "$from"  # where a relative --output belongs
exec "$root/.venv/bin/python" "$root/scripts/demo.py" "$@"
