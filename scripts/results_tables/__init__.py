"""The generated tables of the project's README and of the README in each folder of results/.

Begin with `nano`. A module per folder; its function `sections` gives every marked section by name, as Markdown. Tables
that a GPU's page has too are in `deployment`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
