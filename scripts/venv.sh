# Sourced by demo.sh, gpu.sh and test.sh with the files of pins to install: makes .venv, once per version of the pins.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=("$@")
stamp=.venv/installed-$(cat "${pins[@]}" pyproject.toml | cksum | tr -d ' ')
if [ ! -e "$stamp" ]; then
  python=$(command -v python3.11 || command -v python3)
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "error: $("$python" --version) is too old; install Python 3.11 or newer" >&2; exit 2; }
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "installing the pinned packages into .venv"
  # Compiling every module takes pip as long as all the rest, and most are never imported: Python compiles what it needs.
  add() { .venv/bin/python -m pip install --quiet --no-compile "$@"; }
  add "$(grep ^torch== requirements.txt)"  # by itself first: the other packages then take the build that is there
  for file in "${pins[@]}"; do add -r "$file"; done
  add --no-deps --editable .
  touch "$stamp"
fi
unset PYTHONDONTWRITEBYTECODE  # or each of many processes would compile all modules again
