"""Make every table and picture of results/ and of the README from the measured JSON: nothing is typed by hand.

python scripts/update_results.py

Between <!-- NAME:begin --> and <!-- NAME:end --> a page holds the generated section NAME; the rest of it is prose.
The report (results/README.md, claims.md and a page per scale) is generated as a whole, here and at the end of
scripts/reproduce.py; its marks of changed code are those of the commit that is checked out.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.errors import UserError, run_command
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.grid import SCALES
from scripts.reproduction.report import write_report
from scripts.results_tables import (
    RESULTS,
    admm,
    bench,
    compared,
    demo,
    elastic,
    elastic_picture,
    kernels,
    methods,
    nano,
    scaling,
)
from scripts.trainings import ROOT

TABLES = (demo, nano, elastic, compared, methods, admm, bench, scaling, kernels)
FOLDERS = ("demo", "nano", "micro", "elastic", "methods", "admm", "bench", "scaling", "kernels")
PAGES = (
    ROOT / "README.md",
    *(RESULTS / folder / "README.md" for folder in FOLDERS),
    RESULTS / "elastic" / "tried.md",
    RESULTS / "reliability.md",
)


def main() -> None:
    """Draw the pictures, then write the generated sections of every page, and the report."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    nano.draw_pictures()
    elastic_picture.draw_pictures()
    sections = all_sections()
    for page in PAGES:
        page.write_text(filled(page, sections))
    write_report(RESULTS, ITEMS, list(SCALES.values()))


def all_sections() -> dict[str, str]:
    """Every generated section by its name."""
    return {name: text for module in TABLES for name, text in module.sections().items()}


def filled(page: Path, sections: Mapping[str, str]) -> str:
    """Return the text of a page with its marked sections replaced by those in `sections`.

    Raises:
        UserError: the page marks a section that is not in `sections`.
    """

    def section(match: re.Match) -> str:
        name = match[1]
        if name not in sections:
            known = ", ".join(sections)
            raise UserError(f"{page} marks a section {name!r}, which nothing generates; give one of {known}")
        return f"<!-- {name}:begin -->\n{sections[name]}\n<!-- {name}:end -->"

    return re.sub(r"<!-- (\S+):begin -->\n.*?<!-- \1:end -->", section, page.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    run_command(main)
