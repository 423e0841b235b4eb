"""Fixtures of the tests of scripts: a script's command line, and rows of every item of the reproduction."""

import sys

import pytest

from salaad.common import errors
from tests.helpers.reproduced import all_rows


@pytest.fixture
def rows() -> dict[str, list[dict]]:
    """Item → rows with which each claim holds."""
    return all_rows()


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs a script's main as its command line does; it returns exit code and lines of both outputs."""
    monkeypatch.setattr(errors, "leave", sys.exit)  # the original would end the tests

    def run(script, *arguments: object) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            errors.run_command(script.main)
        printed = capsys.readouterr()
        return left.value.code, printed.out.splitlines(), printed.err.splitlines()

    return run
