"""Scripts started by `python scripts/NAME.py`, for which Python searches only the script's folder for modules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r'^if __name__ == "__main__"', re.M)
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*.py") if STARTED.search(path.read_text()))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_that_imports_others_makes_them_found_first(path):
    text = path.read_text()
    imported = re.search(r"^(?:from|import) (?:salaad|scripts|train)\b", text, re.M)
    if imported:
        added = re.search(r"^sys\.path\.insert\(0, str\(Path\(__file__\)\.resolve\(\)\.(parent|\.)+\)\)$", text, re.M)
        assert added and added.start() < imported.start()
        assert path.parents[added[0].count(".parent") - 1] == ROOT


def test_help_is_there_without_the_checkout_on_the_path(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / "scripts" / "compare_elastic.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--seeds" in done.stdout


# What requirements.txt does not bring is hidden, as where only the README's install was done.
HIDDEN = "import runpy, sys; sys.modules.update(pytest=None, hypothesis=None); sys.argv = sys.argv[1:]; "
HIDDEN += "runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["count_reads.py", "--help"], 0, ""),
        (
            ["reliability/fuzz.py"],
            2,
            "error: fuzz.py needs hypothesis, which is not installed; pip install -r tests/requirements.txt\n",
        ),
    ],
)
def test_a_script_starts_without_what_tests_need_or_says_what_to_install(words, code, said):
    command = [sys.executable, "-c", HIDDEN, ROOT / "scripts" / words[0], *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)
