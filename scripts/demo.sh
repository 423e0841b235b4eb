#!/usr/bin/env bash
# Train a small LLaMA on the documentation of this machine, vanilla and with SALAAD side by side, and compare them.
# Usage: bash scripts/demo.sh [--quick] [--output FOLDER]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt
exec .venv/bin/python scripts/demo.py "$@"
