#!/usr/bin/env bash
# Check and measure everything on the GPU of this machine, and leave one folder results/gpu/NAME to send in.
# Usage: bash scripts/gpu.sh [--hours H] [--output FOLDER] [--device cpu --tiny]
set -euo pipefail
words=()
while [ $# -gt 0 ]; do
  case "$1" in
    --output) [ $# -gt 1 ] || { echo "error: --output is given no folder; give one" >&2; exit 2; }
              words+=("--output" "$(realpath -m -- "$2")"); shift ;;
    --output=*) words+=("--output=$(realpath -m -- "${1#--output=}")") ;;
    *) words+=("$1") ;;
  esac
  shift
done
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" requirements.txt  # which changes into the repository
exec .venv/bin/python scripts/gpu.py "${words[@]}"
