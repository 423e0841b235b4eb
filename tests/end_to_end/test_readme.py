"""What the README promises is there and runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run_on_gpt2(capsys):
    [code, _] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    salaad = namespace["salaad"]
    assert salaad.steps == 40
    assert all(surrogate.alpha > 0 for surrogate in salaad.surrogates.values())
    assert capsys.readouterr().out


def test_every_file_the_map_names_exists():
    [tree] = re.findall(r"## The map\n\n```\n(.*?)```", README, flags=re.DOTALL)
    for name in re.findall(r"\b(\w+\.py)\b", tree):
        assert (ROOT / name).exists() or (ROOT / "salaad" / name).exists(), name
    described = set(re.findall(r"\b(\w+)\.py\b", tree))
    written = {path.stem for path in (ROOT / "salaad").glob("*.py")} - {"__init__"}
    assert written <= described
