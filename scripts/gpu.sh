#!/usr/bin/env bash
# Check and measure everything on the GPU of this machine, and leave one folder results/gpu/NAME to send in.
# Usage: bash scripts/gpu.sh [--hours H] [--output FOLDER] [--device cpu --tiny]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt
exec .venv/bin/python scripts/gpu.py "$@"
